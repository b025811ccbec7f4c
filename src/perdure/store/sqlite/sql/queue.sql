-- What can be claimed, what waits for its thread, attempts and timers.

-- name: insert_ready
INSERT INTO ready (
    run_id, queue, priority, available_at, tenant_id, agent_id, agent_version, required_runtime,
    suspected
)
SELECT
    run_id, queue, priority, ?2, tenant_id, coalesce(active_agent_id, agent_id),
    coalesce(active_agent_version, agent_version), required_runtime, ?3
FROM runs
WHERE run_id = ?1;

-- name: delete_ready
DELETE FROM ready WHERE run_id IN (VALUES (?));

-- name: claim_candidates
-- Priority by priority, the larger first, so that runs whose time has not come cost nothing,
-- however many they are. CROSS JOIN keeps that order; another one would sort all that are ready.
WITH RECURSIVE levels (priority) AS (
    SELECT max(q.priority) FROM ready AS q WHERE q.queue = ?1 AND q.suspected = ?6
    UNION ALL
    SELECT (
        SELECT max(q.priority) FROM ready AS q
        WHERE q.queue = ?1 AND q.suspected = ?6 AND q.priority < levels.priority
    )
    FROM levels WHERE levels.priority IS NOT NULL
)
SELECT r.run_id, r.priority, r.available_at
FROM levels CROSS JOIN ready AS r
WHERE
    r.queue = ?1 AND r.suspected = ?6 AND r.priority = levels.priority AND r.available_at <= ?2
    AND r.required_runtime <= ?3
    AND (r.agent_id, r.agent_version) IN (
        SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?4)
    )
LIMIT ?5;

-- name: is_ready
SELECT 1 FROM ready WHERE run_id = ?;

-- name: count_ready
SELECT queue, count(*), min(available_at) FROM ready WHERE available_at <= ? GROUP BY queue;

-- name: queue_in_thread
INSERT INTO thread_queue (thread_id, position, run_id) VALUES (?, ?, ?);

-- name: leave_thread_queue
DELETE FROM thread_queue
WHERE thread_id = ? AND run_id = ?;

-- name: next_thread_run
SELECT run_id FROM thread_queue WHERE thread_id = ? ORDER BY position LIMIT 1;

-- name: insert_attempt
INSERT INTO attempts (run_id, attempt, token, worker_id, started_at)
SELECT * FROM (VALUES (?, ?, ?, ?, ?)) WHERE column1 IS NOT NULL;

-- name: end_attempt
WITH v (run_id, attempt, ended_at, end_reason, last_commit_id) AS (VALUES (?, ?, ?, ?, ?))
UPDATE attempts SET
    ended_at = v.ended_at, end_reason = v.end_reason, last_commit_id = v.last_commit_id
FROM v
WHERE attempts.run_id = v.run_id AND attempts.attempt = v.attempt;

-- name: find_attempt_end
SELECT end_reason FROM attempts WHERE run_id = ? AND attempt = ?;

-- name: list_attempts
SELECT run_id, attempt, token, worker_id, started_at, ended_at, end_reason, last_commit_id
FROM attempts
WHERE run_id = ?
ORDER BY attempt;

-- name: insert_timer
INSERT INTO timers (run_id, kind, ref, due_at) VALUES (?, ?, ?, ?)
ON CONFLICT (run_id, kind, ref) DO UPDATE SET due_at = excluded.due_at;

-- name: delete_timer
DELETE FROM timers WHERE run_id = ? AND kind = ? AND ref = ?;

-- name: delete_timers
DELETE FROM timers WHERE run_id IN (VALUES (?));

-- name: due_timers
SELECT t.run_id, t.kind, t.ref, t.due_at
FROM timers AS t
INNER JOIN run_state AS s ON s.run_id = t.run_id
WHERE
    t.due_at <= ? AND (t.due_at, t.run_id, t.kind, t.ref) > (?, ?, ?, ?)
    AND t.kind IN (SELECT value FROM json_each(?))
    AND (s.lease_owner IS NULL OR t.kind IN ('child', 'notice'))
    AND s.parked_on IS NOT 'repair'
ORDER BY t.due_at, t.run_id, t.kind, t.ref
LIMIT ?;

-- name: unmoved_runs
-- The entry in `ready`, the timers and the thread of each run of the page are asked for by their keys.
SELECT
    s.run_id,
    s.last_seq,
    s.lease_owner IS NULL AND s.open_interrupts = 0
    AND ifnull(
        s.parked_on IN ('thread', 'timer', 'retry', 'child', 'callback', 'closing'), TRUE
    )
    AND (s.parked_on IS NOT 'child' OR s.open_children = 0)
    AND NOT EXISTS (SELECT 1 FROM ready AS q WHERE q.run_id = s.run_id)
    AND NOT EXISTS (
        SELECT 1 FROM timers AS t WHERE t.run_id = s.run_id AND t.kind <> 'deadline'
    )
    AND NOT EXISTS (
        SELECT 1 FROM runs AS r CROSS JOIN threads AS h ON h.thread_id = r.thread_id
        WHERE r.run_id = s.run_id AND s.parked_on = 'thread' AND h.active_run_id <> s.run_id
    ) AS unmoved
FROM run_state AS s
WHERE s.finished_at IS NULL AND s.run_id > ?
ORDER BY s.run_id
LIMIT ?;

-- name: timers_of
SELECT run_id, kind, ref, due_at FROM timers WHERE run_id = ? ORDER BY due_at, kind, ref;
