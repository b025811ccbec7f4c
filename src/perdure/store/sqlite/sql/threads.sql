-- Branches of threads, what threads are found by, and their deletion.

-- name: insert_thread_base
INSERT INTO thread_bases (
    thread_id, from_position, base_thread_id, base_position, kind, author, run_id, created_at
) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: thread_bases
SELECT
    thread_id, from_position, base_thread_id, base_position, kind, author, run_id, created_at
FROM thread_bases
WHERE thread_id = ?
ORDER BY from_position;

-- name: list_branches
SELECT
    thread_id, from_position, base_thread_id, base_position, kind, author, run_id, created_at
FROM thread_bases
WHERE base_thread_id = ? AND thread_id > ? AND kind = 'fork'
ORDER BY thread_id
LIMIT ?;

-- name: moved_at
SELECT min(place) FROM (
    SELECT min(position) AS place FROM messages
    WHERE
        thread_id = ?1 AND position > ?2
        AND (run_id IS NULL OR (run_id <> ?3 AND seq IS NOT NULL))
    UNION ALL
    SELECT min(from_position) FROM thread_bases WHERE thread_id = ?1 AND from_position > ?2
);

-- name: find_place
SELECT r.thread_id, r.input_position, t.deleted_at
FROM runs AS r INNER JOIN threads AS t ON t.thread_id = r.thread_id
WHERE r.run_id = ?;

-- name: set_last_position
UPDATE threads SET last_position = ?2, updated_at = max(updated_at, ?3) WHERE thread_id = ?1;

-- name: adopt_artifacts
UPDATE artifacts SET status = 'adopted'
WHERE thread_id = ? AND status NOT IN ('cancelled', 'discarded');

-- name: insert_thread_tag
INSERT OR IGNORE INTO thread_tags (tenant_id, digest, thread_id) VALUES (?, ?, ?);

-- name: delete_thread_tags
DELETE FROM thread_tags WHERE tenant_id = ? AND digest = ? AND thread_id = ?;

-- name: list_tagged_threads
-- By the first tag; the others are looked up for each thread that has it.
SELECT
    t.thread_id, t.tenant_id, t.title, t.metadata, t.participants, t.capabilities,
    t.active_run_id, t.last_position, t.created_at, t.updated_at, t.deleted_at
FROM thread_tags AS x
INNER JOIN threads AS t ON t.thread_id = x.thread_id
WHERE
    x.tenant_id = ?1 AND x.digest = ?4 AND x.thread_id < ?2
    AND (?5 IS NULL OR EXISTS (
        SELECT 1 FROM thread_tags AS o
        WHERE o.tenant_id = ?1 AND o.digest = ?5 AND o.thread_id = x.thread_id
    ))
    AND (?6 IS NULL OR EXISTS (
        SELECT 1 FROM thread_tags AS o
        WHERE o.tenant_id = ?1 AND o.digest = ?6 AND o.thread_id = x.thread_id
    ))
    AND (?7 IS NULL OR EXISTS (
        SELECT 1 FROM thread_tags AS o
        WHERE o.tenant_id = ?1 AND o.digest = ?7 AND o.thread_id = x.thread_id
    ))
    AND (?8 IS NULL OR EXISTS (
        SELECT 1 FROM thread_tags AS o
        WHERE o.tenant_id = ?1 AND o.digest = ?8 AND o.thread_id = x.thread_id
    ))
ORDER BY x.thread_id DESC
LIMIT ?3;

-- name: find_unfinished_run
SELECT r.run_id FROM runs AS r CROSS JOIN run_state AS s ON s.run_id = r.run_id
WHERE r.thread_id = ?1 AND s.finished_at IS NULL
UNION ALL
SELECT r.parent_run_id FROM runs AS r CROSS JOIN run_state AS s ON s.run_id = r.parent_run_id
WHERE r.thread_id = ?1 AND r.detached = 0 AND s.finished_at IS NULL
LIMIT 1;

-- name: bury_thread
UPDATE threads SET
    title = '', metadata = ?3, participants = ?4, capabilities = ?4,
    updated_at = max(updated_at, ?2), deleted_at = ?2
WHERE thread_id = ?1;

-- name: end_subscriptions
DELETE FROM subscriptions WHERE thread_id = ?1 OR inbox_thread_id = ?1;

-- name: place_needed
SELECT max(base_position) FROM thread_bases WHERE base_thread_id = ?;

-- name: delete_messages
DELETE FROM messages WHERE thread_id = ? AND position > ?;

-- name: delete_bases
DELETE FROM thread_bases
WHERE thread_id = ?1 AND from_position > ?2 AND (kind = 'adopt' OR ?2 = 0)
RETURNING base_thread_id;

-- name: cut_bases
UPDATE thread_bases SET from_position = ?2, base_position = ?2
WHERE thread_id = ?1 AND from_position > ?2
RETURNING base_thread_id;

-- name: cut_thread
UPDATE threads SET last_position = ?2 WHERE thread_id = ?1;

-- name: find_deleted
SELECT 1 FROM threads WHERE thread_id = ? AND deleted_at IS NOT NULL;

-- name: page_of_deleted
SELECT thread_id FROM threads INDEXED BY threads_deleted
WHERE deleted_at IS NOT NULL AND thread_id > ?1 AND (?2 IS NULL OR thread_id = ?2)
ORDER BY thread_id LIMIT ?3;

-- name: deleted_runs
SELECT r.run_id, s.terminal_seq
FROM threads AS t INDEXED BY threads_deleted
CROSS JOIN runs AS r ON r.thread_id = t.thread_id
CROSS JOIN run_state AS s ON s.run_id = r.run_id
WHERE
    t.deleted_at IS NOT NULL AND t.thread_id BETWEEN ?1 AND ?2
    AND (?3 IS NULL OR t.thread_id = ?3)
    AND s.retained_from_seq < s.terminal_seq
    AND NOT EXISTS (
        SELECT 1 FROM runs AS o CROSS JOIN run_state AS h ON h.run_id = o.run_id
        WHERE o.origin_run_id = r.run_id AND h.retained_from_seq = 1
    )
LIMIT ?4;
