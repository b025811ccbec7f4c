-- What is no longer kept.

-- name: page_of_runs
-- Ended rows never move any more, so nothing is locked to look at them. An index holds those that
-- have their history still; of the others, and of younger ones, not even the rows are read.
SELECT s.*, r.tenant_id, coalesce($3::timestamptz, now()) AS now
  FROM run_state AS s JOIN runs AS r ON r.run_id = s.run_id
 WHERE s.run_id > $1::uuid AND s.retained_from_seq < s.terminal_seq
   AND s.finished_at <= coalesce($3::timestamptz, now()) - $4::float8 * interval '1 second'
 ORDER BY s.run_id
 LIMIT $2;

-- name: find_sharer
-- Whose histories are shared by runs that have their own still. The rows asked about are locked.
SELECT DISTINCT r.origin_run_id AS run_id
  FROM runs AS r JOIN run_state AS s ON s.run_id = r.run_id
 WHERE r.origin_run_id = ANY ($1::uuid[]) AND s.retained_from_seq = 1;

-- name: drop_history
WITH u AS MATERIALIZED (
    SELECT s.run_id, s.terminal_seq
      FROM run_state AS s
     WHERE s.run_id = ANY ($1::uuid[]) AND s.retained_from_seq < s.terminal_seq
       FOR NO KEY UPDATE
), e AS (
    DELETE FROM events AS e USING u WHERE e.run_id = u.run_id AND e.seq < u.terminal_seq
), c AS (
    DELETE FROM checkpoints AS c USING u WHERE c.run_id = u.run_id
), b AS (
    DELETE FROM blob_uses AS b USING u WHERE b.run_id = u.run_id AND NOT b.lasts
)
UPDATE run_state AS s SET retained_from_seq = u.terminal_seq, checkpoint_seq = NULL
  FROM u WHERE s.run_id = u.run_id
RETURNING s.run_id;

-- name: delete_blobs
-- Of a page by the primary key. What is locked is in use.
WITH page AS MATERIALIZED (
    SELECT b.tenant_id, b.digest
      FROM blobs AS b
     WHERE (b.tenant_id, b.digest) > ($3::text, $4::bytea)
     ORDER BY b.tenant_id, b.digest LIMIT $5
), idle AS MATERIALIZED (
    SELECT b.tenant_id, b.digest
      FROM page AS p JOIN blobs AS b ON b.tenant_id = p.tenant_id AND b.digest = p.digest
     WHERE b.last_referenced_at < coalesce($1::timestamptz, now()) - $2 * interval '1 second'
       AND NOT EXISTS (
           SELECT 1 FROM blob_uses AS u WHERE u.tenant_id = b.tenant_id AND u.digest = b.digest)
       FOR UPDATE OF b SKIP LOCKED
), gone AS (
    DELETE FROM blobs AS b USING idle
     WHERE b.tenant_id = idle.tenant_id AND b.digest = idle.digest
       AND b.last_referenced_at < coalesce($1::timestamptz, now()) - $2 * interval '1 second'
    RETURNING 1
)
SELECT s.seen, d.deleted, l.tenant_id, l.digest
  FROM (SELECT count(*) AS seen FROM page) AS s
 CROSS JOIN (SELECT count(*) AS deleted FROM gone) AS d
  LEFT JOIN (SELECT tenant_id, digest FROM page
              ORDER BY tenant_id DESC, digest DESC LIMIT 1) AS l ON true;
