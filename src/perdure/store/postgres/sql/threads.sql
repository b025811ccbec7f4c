-- Branches of threads, what threads are found by, and their deletion.

-- name: insert_thread_base
INSERT INTO thread_bases (thread_id, base_thread_id, run_id, created_at, from_position,
                          base_position, kind, author)
VALUES ($1::uuid, $2::uuid, $3::uuid, coalesce($4::timestamptz, now()), $5, $6, $7, $8)
RETURNING created_at;

-- name: thread_bases
SELECT thread_id, base_thread_id, run_id, created_at, from_position, base_position, kind, author
  FROM thread_bases WHERE thread_id = $1::uuid ORDER BY from_position;

-- name: list_branches
SELECT thread_id, base_thread_id, run_id, created_at, from_position, base_position, kind, author
  FROM thread_bases
 WHERE base_thread_id = $1::uuid AND ($2::uuid IS NULL OR thread_id > $2) AND kind = 'fork'
 ORDER BY thread_id LIMIT $3;

-- name: moved_at
SELECT min(m.place) AS place FROM (
    SELECT min(position) AS place FROM messages
     WHERE thread_id = $1::uuid AND position > $2
       AND (run_id IS NULL OR (run_id <> $3::uuid AND seq IS NOT NULL))
    UNION ALL
    SELECT min(from_position) FROM thread_bases WHERE thread_id = $1::uuid AND from_position > $2
) AS m;

-- name: lock_thread_of
SELECT t.thread_id FROM runs AS r JOIN threads AS t ON t.thread_id = r.thread_id
 WHERE r.run_id = $1::uuid FOR NO KEY UPDATE OF t NOWAIT;

-- name: find_place
SELECT r.thread_id, r.input_position, t.deleted_at, coalesce($2::timestamptz, now()) AS now
  FROM runs AS r JOIN threads AS t ON t.thread_id = r.thread_id
 WHERE r.run_id = $1::uuid FOR NO KEY UPDATE OF t NOWAIT;

-- name: lock_threads
-- In order of id, so that two callers never wait for each other.
SELECT thread_id, tenant_id, title, metadata, participants, capabilities, active_run_id,
       last_position, created_at, updated_at, deleted_at, coalesce($2::timestamptz, now()) AS now
  FROM threads WHERE thread_id = ANY ($1::uuid[]) ORDER BY thread_id FOR NO KEY UPDATE;

-- name: set_last_position
UPDATE threads SET last_position = $2,
       updated_at = greatest(updated_at, coalesce($3::timestamptz, now()))
 WHERE thread_id = $1::uuid;

-- name: adopt_artifacts
UPDATE artifacts SET status = 'adopted'
 WHERE thread_id = $1::uuid AND status NOT IN ('cancelled', 'discarded');

-- name: insert_thread_tag
INSERT INTO thread_tags (thread_id, tenant_id, digest)
SELECT $1::uuid, $2, u.digest FROM unnest($3::bytea[]) AS u(digest)
    ON CONFLICT DO NOTHING;

-- name: delete_thread_tags
DELETE FROM thread_tags
 WHERE tenant_id = $1 AND digest = ANY ($2::bytea[]) AND thread_id = $3::uuid;

-- name: list_tagged_threads
-- By the first tag; the others are looked up for each thread that has it.
SELECT t.thread_id, t.tenant_id, t.title, t.metadata, t.participants, t.capabilities,
       t.active_run_id, t.last_position, t.created_at, t.updated_at, t.deleted_at
  FROM thread_tags AS x JOIN threads AS t ON t.thread_id = x.thread_id
 WHERE x.tenant_id = $1 AND x.digest = ($4::bytea[])[1]
   AND ($2::uuid IS NULL OR x.thread_id < $2)
   AND NOT EXISTS (
       SELECT 1 FROM unnest($4::bytea[]) AS w(digest)
        WHERE NOT EXISTS (
            SELECT 1 FROM thread_tags AS o
             WHERE o.tenant_id = $1 AND o.digest = w.digest AND o.thread_id = x.thread_id))
 ORDER BY x.thread_id DESC LIMIT $3;

-- name: find_unfinished_run
SELECT r.run_id FROM runs AS r JOIN run_state AS s ON s.run_id = r.run_id
 WHERE r.thread_id = $1::uuid AND s.finished_at IS NULL
 UNION ALL
SELECT r.parent_run_id FROM runs AS r JOIN run_state AS s ON s.run_id = r.parent_run_id
 WHERE r.thread_id = $1::uuid AND NOT r.detached AND s.finished_at IS NULL
 LIMIT 1;

-- name: bury_thread
UPDATE threads SET title = '', metadata = $3, participants = $4, capabilities = $4,
       updated_at = greatest(updated_at, coalesce($2::timestamptz, now())),
       deleted_at = coalesce($2::timestamptz, now())
 WHERE thread_id = $1::uuid;

-- name: end_subscriptions
DELETE FROM subscriptions WHERE thread_id = $1::uuid OR inbox_thread_id = $1::uuid;

-- name: place_needed
SELECT max(base_position) AS place FROM thread_bases WHERE base_thread_id = $1::uuid;

-- name: delete_messages
DELETE FROM messages WHERE thread_id = $1::uuid AND position > $2;

-- name: delete_bases
DELETE FROM thread_bases
 WHERE thread_id = $1::uuid AND from_position > $2 AND (kind = 'adopt' OR $2 = 0)
RETURNING base_thread_id;

-- name: cut_bases
UPDATE thread_bases SET from_position = $2, base_position = $2
 WHERE thread_id = $1::uuid AND from_position > $2
RETURNING base_thread_id;

-- name: cut_thread
UPDATE threads SET last_position = $2 WHERE thread_id = $1::uuid;

-- name: find_deleted
SELECT 1 AS found FROM threads WHERE thread_id = $1::uuid AND deleted_at IS NOT NULL
   FOR NO KEY UPDATE;

-- name: page_of_deleted
SELECT thread_id FROM threads
 WHERE deleted_at IS NOT NULL AND thread_id > $1::uuid AND ($2::uuid IS NULL OR thread_id = $2)
 ORDER BY thread_id LIMIT $3;

-- name: deleted_runs
SELECT r.run_id
  FROM runs AS r
  JOIN run_state AS s ON s.run_id = r.run_id
 WHERE r.thread_id = ANY ($1::uuid[]) AND s.retained_from_seq < s.terminal_seq
   AND NOT EXISTS (
       SELECT 1 FROM runs AS o JOIN run_state AS h ON h.run_id = o.run_id
        WHERE o.origin_run_id = r.run_id AND h.retained_from_seq = 1)
 LIMIT $2;
