-- The log of a run and the rows that point into it.

-- name: insert_event
INSERT INTO events (run_id, seq, type, step_index, at, attempt, epoch, schema_version, data)
SELECT * FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)) WHERE column1 IS NOT NULL;

-- name: events_after
SELECT seq, type, step_index, at, attempt, epoch, schema_version, data
FROM events
WHERE run_id = ? AND seq > ?
ORDER BY seq
LIMIT ?;

-- name: upsert_step
INSERT INTO steps (run_id, step_index, status, first_seq, last_seq, started_at, ended_at)
SELECT * FROM (VALUES (?, ?, ?, ?, ?, ?, ?)) WHERE column1 IS NOT NULL
ON CONFLICT (run_id, step_index) DO UPDATE SET
    status = excluded.status,
    last_seq = coalesce(excluded.last_seq, steps.last_seq),
    ended_at = CASE
        WHEN excluded.ended_at IS NOT NULL THEN coalesce(steps.ended_at, excluded.ended_at)
    END;

-- name: list_steps
SELECT step_index, status, first_seq, last_seq, started_at, ended_at
FROM steps
WHERE run_id = ? AND step_index > ?
ORDER BY step_index
LIMIT ?;

-- name: insert_tool_call
INSERT INTO tool_calls (
    tool_call_id, run_id, step_index, ordinal, tool, version, side_effect, repeatable,
    needs_approval, status, args_digest, effective_digest, effect_key, external_ref, action_seq,
    result_seq
)
SELECT * FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?))
WHERE column1 IS NOT NULL;

-- name: update_tool_call
WITH v (tool_call_id, run_id, status, effective_digest, external_ref, result_seq) AS (
    VALUES (?, ?, ?, ?, ?, ?)
)
UPDATE tool_calls SET
    status = v.status,
    effective_digest = coalesce(v.effective_digest, tool_calls.effective_digest),
    external_ref = coalesce(v.external_ref, tool_calls.external_ref),
    result_seq = coalesce(v.result_seq, tool_calls.result_seq)
FROM v
WHERE tool_calls.tool_call_id = v.tool_call_id AND tool_calls.run_id = v.run_id;

-- name: update_tool_call_one
-- The same for one row: without FROM it costs a third.
UPDATE tool_calls SET
    status = ?3,
    effective_digest = coalesce(?4, effective_digest),
    external_ref = coalesce(?5, external_ref),
    result_seq = coalesce(?6, result_seq)
WHERE tool_call_id = ?1 AND run_id = ?2;

-- name: list_tool_calls
SELECT
    tool_call_id, run_id, step_index, ordinal, tool, version, side_effect, repeatable,
    needs_approval, status, args_digest, effective_digest, effect_key, external_ref, action_seq,
    result_seq
FROM tool_calls
WHERE run_id = ? AND (step_index, ordinal) > (?, ?)
ORDER BY step_index, ordinal
LIMIT ?;

-- name: find_tool_call
SELECT
    c.tool_call_id, c.run_id, c.step_index, c.ordinal, c.tool, c.version, c.side_effect,
    c.repeatable, c.needs_approval, c.status, c.args_digest, c.effective_digest, c.effect_key,
    c.external_ref, c.action_seq, c.result_seq
FROM tool_calls AS c
INNER JOIN runs AS r ON r.run_id = c.run_id
WHERE c.tool_call_id = ? AND r.tenant_id = ?;

-- name: insert_first_execution
-- Of a call of the same commit.
INSERT INTO tool_executions (run_id, tool_call_id, number, attempt, args_digest, started_at)
SELECT * FROM (VALUES (?, ?, ?, ?, ?, ?)) WHERE column1 IS NOT NULL;

-- name: insert_execution
-- No row: there is no such call.
WITH v (run_id, tool_call_id, number, attempt, args_digest, started_at) AS (
    VALUES (?, ?, ?, ?, ?, ?)
)
INSERT INTO tool_executions (run_id, tool_call_id, number, attempt, args_digest, started_at)
SELECT
    c.run_id, c.tool_call_id, v.number, v.attempt, nullif(v.args_digest, c.args_digest),
    v.started_at
FROM v
CROSS JOIN tool_calls AS c ON c.tool_call_id = v.tool_call_id AND c.run_id = v.run_id;

-- name: end_execution
WITH v (run_id, tool_call_id, number, ended_at, outcome) AS (VALUES (?, ?, ?, ?, ?))
UPDATE tool_executions SET ended_at = v.ended_at, outcome = v.outcome
FROM v
WHERE
    tool_executions.run_id = v.run_id AND tool_executions.tool_call_id = v.tool_call_id
    AND tool_executions.number = v.number;

-- name: end_execution_one
UPDATE tool_executions SET ended_at = ?4, outcome = ?5
WHERE run_id = ?1 AND tool_call_id = ?2 AND number = ?3;

-- name: list_executions
SELECT
    e.tool_call_id, e.number, e.attempt, coalesce(e.args_digest, c.args_digest), e.started_at,
    e.ended_at, e.outcome
FROM tool_executions AS e
INNER JOIN tool_calls AS c ON c.tool_call_id = e.tool_call_id
WHERE e.run_id = ?
ORDER BY e.number, e.tool_call_id;

-- name: open_executions
SELECT
    e.tool_call_id, e.number, e.attempt, coalesce(e.args_digest, c.args_digest), e.started_at,
    e.ended_at, e.outcome
FROM tool_calls AS c
INNER JOIN tool_executions AS e ON e.run_id = c.run_id AND e.tool_call_id = c.tool_call_id
WHERE
    c.run_id = ?
    AND c.status IN ('proposed', 'awaiting_approval', 'running', 'pending')
ORDER BY e.number, e.tool_call_id;

-- name: insert_checkpoint
INSERT INTO checkpoints (
    run_id, seq, parent_seq, step_index, attempt, epoch, schema_version, digest,
    created_at, agent_state
)
SELECT * FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)) WHERE column1 IS NOT NULL;

-- name: list_checkpoints
SELECT
    run_id, seq, parent_seq, step_index, attempt, epoch, schema_version, digest,
    created_at, agent_state
FROM checkpoints
WHERE run_id = ? AND seq < ?
ORDER BY seq DESC
LIMIT ?;

-- name: find_checkpoint
SELECT
    c.run_id, c.seq, c.parent_seq, c.step_index, c.attempt, c.epoch,
    c.schema_version, c.digest, c.created_at, c.agent_state
FROM checkpoints AS c
INNER JOIN runs AS r ON r.run_id = c.run_id
WHERE c.run_id = ? AND c.seq = ? AND r.tenant_id = ?;

-- name: insert_late
INSERT INTO late_results (
    run_id, tool_call_id, execution, attempt, epoch, seq, status, external_ref, recorded_at,
    digest
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: find_late
SELECT digest FROM late_results WHERE run_id = ? AND tool_call_id = ? AND execution = ?;

-- name: list_late
SELECT tool_call_id, execution, run_id, attempt, epoch, seq, status, external_ref, recorded_at
FROM late_results
WHERE run_id = ?
ORDER BY seq;

-- name: insert_blob
INSERT INTO blobs (tenant_id, digest, media_type, created_at, last_referenced_at, data)
VALUES (?1, ?2, ?3, ?4, ?4, ?5)
ON CONFLICT (tenant_id, digest) DO UPDATE SET
    last_referenced_at = max(blobs.last_referenced_at, excluded.last_referenced_at);

-- name: use_blob
INSERT INTO blob_uses (run_id, tenant_id, digest, lasts) VALUES (?, ?, ?, ?)
ON CONFLICT (run_id, digest) DO UPDATE SET lasts = max(blob_uses.lasts, excluded.lasts);

-- name: read_blob
SELECT data FROM blobs WHERE tenant_id = ? AND digest = ?;
