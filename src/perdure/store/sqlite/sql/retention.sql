-- What is no longer kept.

-- name: page_of_runs
-- The next runs, with the number of events that may be due of each; the rules have the last word.
SELECT
    p.run_id, p.tenant_id,
    CASE WHEN s.finished_at <= ?3 THEN s.terminal_seq - s.retained_from_seq ELSE 0 END
FROM (SELECT run_id, tenant_id FROM runs WHERE run_id > ?1 ORDER BY run_id LIMIT ?2) AS p
CROSS JOIN run_state AS s ON s.run_id = p.run_id;

-- name: find_sharer
SELECT 1 FROM runs AS r CROSS JOIN run_state AS s ON s.run_id = r.run_id
WHERE r.origin_run_id = ? AND s.retained_from_seq = 1 LIMIT 1;

-- name: delete_history
DELETE FROM events WHERE run_id = ? AND seq < ?;

-- name: delete_checkpoints
DELETE FROM checkpoints WHERE run_id = ?;

-- name: delete_blob_uses
DELETE FROM blob_uses WHERE run_id = ? AND NOT lasts;

-- name: set_retained
UPDATE run_state SET retained_from_seq = ?2, checkpoint_seq = NULL WHERE run_id = ?1;

-- name: page_of_blobs
SELECT count(*), max(place)
FROM (SELECT rowid AS place FROM blobs WHERE rowid > ? ORDER BY rowid LIMIT ?);

-- name: delete_blobs
DELETE FROM blobs
WHERE
    rowid > ? AND rowid <= ? AND last_referenced_at < ?
    AND NOT EXISTS (
        SELECT 1 FROM blob_uses AS u
        WHERE u.tenant_id = blobs.tenant_id AND u.digest = blobs.digest
    );
