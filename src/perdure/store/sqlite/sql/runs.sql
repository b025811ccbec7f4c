-- The cold row, the hot row, and what decides who may move it.

-- name: insert_run
INSERT INTO runs (
    run_id, tenant_id, agent_id, agent_version, thread_id, root_run_id, parent_run_id, retry_of,
    queue, priority, max_attempts, required_runtime, schema_version, input_position, trace_id,
    idempotency_key, fingerprint, created_at, input, context, options, caller
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_run_state
INSERT INTO run_state (
    state, step_index, last_seq, retained_from_seq, attempt, faults, lease_owner, lease_token,
    lease_expires_at, cancel_epoch, cancel_action, parked_on, waiting_kind, waiting_since, wake_at,
    deadline_at, code, open_calls, open_interrupts, open_children, model_calls, tool_calls,
    input_tokens, output_tokens, cost, waiting_ms, retries, checkpoint_seq, terminal_seq,
    started_at, finished_at, updated_at, last_commit_id, deadline_left, run_id
) VALUES (
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
    ?, ?, ?
);

-- name: find_idempotent_run
SELECT * FROM run_rows
WHERE run_id = (
    SELECT run_id FROM runs WHERE tenant_id = ? AND agent_id = ? AND idempotency_key = ?
);

-- name: find_run
SELECT * FROM run_rows WHERE run_id = ?1 AND (?2 IS NULL OR tenant_id = ?2);

-- name: find_run_keys
SELECT tenant_id, thread_id FROM runs WHERE run_id = ?;

-- name: find_attempts_max
SELECT max_attempts FROM runs WHERE run_id = ?;

-- name: load_hot
SELECT
    state, step_index, last_seq, retained_from_seq, attempt, faults, lease_owner, lease_token,
    lease_expires_at, cancel_epoch, cancel_action, parked_on, waiting_kind, waiting_since, wake_at,
    deadline_at, code, open_calls, open_interrupts, open_children, model_calls, tool_calls,
    input_tokens, output_tokens, cost, waiting_ms, retries, checkpoint_seq, terminal_seq,
    started_at, finished_at, updated_at, last_commit_id, deadline_left
FROM run_state
WHERE run_id = ?;

-- name: save_hot
UPDATE run_state SET
    state = ?, step_index = ?, last_seq = ?, retained_from_seq = ?, attempt = ?, faults = ?,
    lease_owner = ?, lease_token = ?, lease_expires_at = ?, cancel_epoch = ?, cancel_action = ?,
    parked_on = ?, waiting_kind = ?, waiting_since = ?, wake_at = ?, deadline_at = ?, code = ?,
    open_calls = ?, open_interrupts = ?, open_children = ?, model_calls = ?, tool_calls = ?,
    input_tokens = ?, output_tokens = ?, cost = ?, waiting_ms = ?, retries = ?, checkpoint_seq = ?,
    terminal_seq = ?, started_at = ?, finished_at = ?, updated_at = ?, last_commit_id = ?,
    deadline_left = ?
WHERE run_id = ?;

-- name: advance_run
-- The fence and the advance in one: a holder's step that keeps its lease, between planning and
-- executing. No row: somebody else wrote, or the clock went back; load_hot tells.
-- Without RETURNING, which costs a third of the statement: the writer knows the attempt.
UPDATE run_state SET
    state = ?, step_index = ?, last_seq = last_seq + ?, faults = ?, parked_on = ?,
    waiting_kind = ?, code = ?, open_calls = ?, open_interrupts = ?, open_children = ?,
    model_calls = ?, tool_calls = ?, input_tokens = ?, output_tokens = ?, cost = ?,
    waiting_ms = ?, retries = ?, checkpoint_seq = ?, updated_at = ?, last_commit_id = ?
WHERE
    run_id = ? AND lease_token = ? AND cancel_epoch = ? AND state = ? AND last_seq = ?
    AND lease_owner IS NOT NULL AND updated_at <= ? AND last_commit_id IS NOT ?;

-- name: renew_lease
UPDATE run_state SET lease_expires_at = ?
WHERE run_id = ? AND lease_token = ? AND lease_owner = ?
RETURNING cancel_epoch;

-- name: find_epoch
SELECT cancel_epoch FROM run_state WHERE run_id = ?;

-- name: expired_leases
SELECT run_id FROM run_state
WHERE lease_owner IS NOT NULL AND lease_expires_at <= ?
ORDER BY lease_expires_at, run_id
LIMIT ?;

-- name: list_runs
SELECT * FROM run_rows
WHERE
    run_id < ?1 AND (?2 IS NULL OR tenant_id = ?2)
    AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR agent_id = ?4)
    AND (?5 IS NULL OR thread_id = ?5) AND (?6 IS NULL OR parent_run_id = ?6)
    AND (NOT ?7 OR state NOT IN ('succeeded', 'failed'))
ORDER BY run_id DESC
LIMIT ?8;

-- name: list_thread_runs
SELECT * FROM run_rows
WHERE
    run_id < ?1 AND (?2 IS NULL OR tenant_id = ?2)
    AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR agent_id = ?4)
    AND thread_id = ?5 AND (?6 IS NULL OR parent_run_id = ?6)
    AND (NOT ?7 OR state NOT IN ('succeeded', 'failed'))
ORDER BY run_id DESC
LIMIT ?8;

-- name: list_child_runs
SELECT * FROM run_rows
WHERE
    run_id < ?1 AND (?2 IS NULL OR tenant_id = ?2)
    AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR agent_id = ?4)
    AND (?5 IS NULL OR thread_id = ?5) AND parent_run_id = ?6
    AND (NOT ?7 OR state NOT IN ('succeeded', 'failed'))
ORDER BY run_id DESC
LIMIT ?8;

-- name: list_unfinished_runs
-- CROSS JOIN keeps the order of the tables: few runs are unfinished among all that are kept.
SELECT r.*
FROM run_state AS u CROSS JOIN run_rows AS r ON r.run_id = u.run_id
WHERE
    u.run_id < ?1 AND u.finished_at IS NULL AND (?2 IS NULL OR r.tenant_id = ?2)
    AND (?3 IS NULL OR u.state = ?3) AND (?4 IS NULL OR r.agent_id = ?4)
    AND (?5 IS NULL OR r.thread_id = ?5) AND (?6 IS NULL OR r.parent_run_id = ?6)
    AND (?7 OR TRUE)
ORDER BY u.run_id DESC
LIMIT ?8;

-- name: count_states
SELECT state, count(*) FROM run_state WHERE finished_at IS NULL GROUP BY state;

-- name: ping_runs
SELECT 1 FROM run_state LIMIT 1;
