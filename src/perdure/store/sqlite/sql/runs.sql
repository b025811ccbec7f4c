-- The cold row, the hot row, and what decides who may move it.

-- name: insert_run
INSERT INTO runs (
    run_id, tenant_id, agent_id, agent_version, thread_id, root_run_id, parent_run_id, retry_of,
    forked_from, origin_run_id, origin_seq, queue, priority, max_attempts, required_runtime,
    schema_version, input_position, trace_id, idempotency_key, fingerprint, created_at, input,
    context, options, caller, depth, detached
) VALUES (
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
);

-- name: insert_run_state
INSERT INTO run_state (
    state, step_index, last_seq, retained_from_seq, attempt, faults, lease_owner, lease_token,
    lease_expires_at, cancel_epoch, cancel_action, parked_on, waiting_kind, waiting_since, wake_at,
    deadline_at, code, open_calls, open_interrupts, open_children, model_calls, tool_calls,
    input_tokens, output_tokens, cost, waiting_ms, retries, checkpoint_seq, terminal_seq,
    started_at, finished_at, updated_at, last_commit_id, deadline_left,
    cancel_options, run_id
) VALUES (
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
    ?, ?, ?, ?
);

-- name: find_idempotent_run
SELECT * FROM run_rows
WHERE run_id = (
    SELECT run_id FROM runs WHERE tenant_id = ? AND agent_id = ? AND idempotency_key = ?
);

-- name: find_run
SELECT * FROM run_rows WHERE run_id = ?1 AND (?2 IS NULL OR tenant_id = ?2);

-- name: leases_of
SELECT run_id, lease_token FROM run_state WHERE lease_owner = ? ORDER BY run_id LIMIT ?;

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
    started_at, finished_at, updated_at, last_commit_id, deadline_left, cancel_options
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
    deadline_left = ?, cancel_options = ?
WHERE run_id = ?;

-- name: pass_fence
-- The fence: which of these commits their holders may write, as JSON [[place, attempt, thread]],
-- the thread only where the run ends. One value: each row of an answer is a call of the driver.
-- One that is missing: somebody else wrote, or the clock went back; load_hot tells.
WITH v (place, run_id, token, epoch, state, seq, now, commit_id, ends) AS (
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
)
SELECT json_group_array(json_array(v.place, s.attempt, CASE WHEN v.ends THEN (
    SELECT hex(r.thread_id) FROM runs AS r WHERE r.run_id = v.run_id
) END))
FROM v CROSS JOIN run_state AS s ON s.run_id = v.run_id
WHERE
    s.lease_token = v.token AND s.cancel_epoch = v.epoch AND s.state = v.state
    AND s.last_seq = v.seq AND s.lease_owner IS NOT NULL AND s.updated_at <= v.now
    AND s.last_commit_id IS NOT v.commit_id;

-- name: finish_runs
-- Of runs that end, what has an index: apart, so that no other step touches it.
WITH v (run_id, finished_at) AS (VALUES (?, ?))
UPDATE run_state SET
    lease_owner = NULL, lease_expires_at = NULL, finished_at = v.finished_at, wake_at = NULL
FROM v
WHERE run_state.run_id = v.run_id;

-- name: advance_runs
-- Of runs whose holders passed pass_fence in the same transaction.
WITH v (
    run_id, state, step_index, events, faults, parked_on, waiting_kind, code, open_calls,
    open_interrupts, open_children, model_calls, tool_calls, input_tokens, output_tokens, cost,
    waiting_ms, retries, checkpoint_seq, now, commit_id, started_at, terminal_seq
) AS (
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
)
UPDATE run_state SET
    state = v.state, step_index = v.step_index, last_seq = run_state.last_seq + v.events,
    faults = v.faults, parked_on = v.parked_on, waiting_kind = v.waiting_kind, code = v.code,
    open_calls = v.open_calls, open_interrupts = v.open_interrupts,
    open_children = v.open_children, model_calls = v.model_calls, tool_calls = v.tool_calls,
    input_tokens = v.input_tokens, output_tokens = v.output_tokens, cost = v.cost,
    waiting_ms = v.waiting_ms, retries = v.retries, checkpoint_seq = v.checkpoint_seq,
    updated_at = v.now, last_commit_id = v.commit_id,
    started_at = coalesce(run_state.started_at, v.started_at), terminal_seq = v.terminal_seq
FROM v
WHERE run_state.run_id = v.run_id;

-- name: advance_run
-- The fence and the move of one run that goes on, in one statement; no row: pass_fence tells why.
UPDATE run_state SET
    state = ?2, step_index = ?3, last_seq = last_seq + ?4,
    faults = ?5, parked_on = ?6, waiting_kind = ?7, code = ?8,
    open_calls = ?9, open_interrupts = ?10,
    open_children = ?11, model_calls = ?12, tool_calls = ?13,
    input_tokens = ?14, output_tokens = ?15, cost = ?16,
    waiting_ms = ?17, retries = ?18, checkpoint_seq = ?19,
    updated_at = ?20, last_commit_id = ?21,
    started_at = coalesce(started_at, ?22), terminal_seq = ?23
WHERE
    run_id = ?1
    AND lease_token = ?24 AND cancel_epoch = ?25 AND state = ?26 AND last_seq = ?27
    AND lease_owner IS NOT NULL AND updated_at <= ?20 AND last_commit_id IS NOT ?21
RETURNING attempt;

-- name: renew_lease
-- Of leases that find_epoch found held in the same transaction.
WITH v (run_id, expires_at) AS (VALUES (?, ?))
UPDATE run_state SET lease_expires_at = v.expires_at
FROM v
WHERE run_state.run_id = v.run_id;

-- name: find_epoch
-- As JSON [[place, epoch, held]]; one value, because each row of an answer is a call of the driver.
WITH v (place, run_id, token, owner) AS (VALUES (?, ?, ?, ?))
SELECT json_group_array(
    json_array(v.place, s.cancel_epoch, s.lease_token = v.token AND s.lease_owner IS v.owner)
)
FROM v CROSS JOIN run_state AS s ON s.run_id = v.run_id;

-- name: expired_leases
-- Those that ran out after the last one of the page before.
SELECT run_id, lease_expires_at FROM run_state
WHERE lease_owner IS NOT NULL AND lease_expires_at <= ? AND (lease_expires_at, run_id) > (?, ?)
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

-- name: thread_runs
-- A run's input is the message of it that has no event.
SELECT m.position, r.*
FROM messages AS m
INNER JOIN run_rows AS r ON r.run_id = m.run_id
WHERE m.thread_id = ? AND m.position > ? AND m.run_id IS NOT NULL AND m.seq IS NULL
ORDER BY m.position
LIMIT ?;

-- name: list_child_runs
SELECT * FROM run_rows
WHERE
    run_id < ?1 AND (?2 IS NULL OR tenant_id = ?2)
    AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR agent_id = ?4)
    AND (?5 IS NULL OR thread_id = ?5) AND parent_run_id = ?6
    AND (NOT ?7 OR state NOT IN ('succeeded', 'failed'))
ORDER BY run_id DESC
LIMIT ?8;

-- name: list_tree_runs
SELECT * FROM run_rows
WHERE
    run_id < ?1 AND (?2 IS NULL OR tenant_id = ?2) AND root_run_id = ?3
    AND parent_run_id IS NOT NULL AND (NOT ?4 OR state NOT IN ('succeeded', 'failed'))
ORDER BY run_id DESC
LIMIT ?5;

-- name: list_runs_from
SELECT * FROM run_rows
WHERE run_id < ?1 AND (?2 IS NULL OR tenant_id = ?2) AND origin_run_id = ?3
ORDER BY run_id DESC
LIMIT ?4;

-- name: unfinished_children
SELECT r.run_id FROM runs AS r CROSS JOIN run_state AS s ON s.run_id = r.run_id
WHERE r.parent_run_id = ? AND NOT r.detached AND s.finished_at IS NULL
ORDER BY r.run_id;

-- name: hand_over_run
UPDATE runs SET active_agent_id = ?, active_agent_version = ? WHERE run_id = ?;

-- name: is_unfinished
SELECT 1 FROM run_state WHERE run_id = ? AND finished_at IS NULL;

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
