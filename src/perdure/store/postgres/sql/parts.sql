-- The rare parts of commits, after `commit_batch` in the same transaction, for accepted runs only.
-- Each statement takes the rows of all of them. `at` is the time the run's row carries.

-- name: insert_interrupt
INSERT INTO interrupts (interrupt_id, run_id, tool_call_id, created_at, expires_at, opened_seq,
                        tenant_id, kind, status, on_expiry, args_digest, definition_digest, key)
SELECT u.interrupt_id, u.run_id, u.tool_call_id, u.at,
       coalesce($1::timestamptz, now()) + u.expires_in_s * interval '1 second', u.opened_seq,
       r.tenant_id, u.kind, 'pending', u.on_expiry, u.args_digest, u.definition_digest, u.key
  FROM unnest($2::uuid[], $3::uuid[], $4::uuid[], $5::timestamptz[], $6::float8[], $7::int[],
              $8::text[], $9::text[], $10::bytea[], $11::bytea[], $12::bytea[])
       AS u(interrupt_id, run_id, tool_call_id, at, expires_in_s, opened_seq, kind, on_expiry,
            args_digest, definition_digest, key)
  JOIN runs AS r ON r.run_id = u.run_id
RETURNING interrupt_id, run_id, expires_at;

-- name: close_interrupt
UPDATE interrupts AS x
   SET status = u.status, closed_seq = u.closed_seq, answer = u.answer,
       answer_digest = u.answer_digest, answered_by = u.answered_by,
       answered_at = CASE WHEN u.status = 'answered' THEN u.at END,
       args_digest = coalesce(u.effective_digest, x.args_digest)
  FROM unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::int[], $5::text[], $6::text[],
              $7::bytea[], $8::bytea[], $9::bytea[])
       AS u(interrupt_id, run_id, at, closed_seq, status, answer, answer_digest, answered_by,
            effective_digest)
 WHERE x.interrupt_id = u.interrupt_id AND x.run_id = u.run_id AND x.status = 'pending'
RETURNING 1 AS closed;

-- name: spend_approval
UPDATE interrupts AS x SET consumed_by = u.number
  FROM unnest($1::uuid[], $2::int[]) AS u(interrupt_id, number)
 WHERE x.interrupt_id = u.interrupt_id AND x.consumed_by IS NULL
RETURNING 1 AS spent;

-- name: insert_artifact
INSERT INTO artifacts (artifact_id, run_id, thread_id, tool_call_id, created_at, size, version,
                       step_index, seq, tenant_id, status, digest, name, media_type)
SELECT u.artifact_id, u.run_id, r.thread_id, u.tool_call_id, u.at, u.size, u.version, u.step_index,
       u.seq, r.tenant_id, u.status, u.digest, u.name, u.media_type
  FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::timestamptz[], $5::bigint[], $6::int[],
              $7::int[], $8::int[], $9::text[], $10::bytea[], $11::bytea[], $12::bytea[])
       AS u(artifact_id, run_id, tool_call_id, at, size, version, step_index, seq, status, digest,
            name, media_type)
  JOIN runs AS r ON r.run_id = u.run_id;

-- name: discard_artifacts
UPDATE artifacts SET status = 'discarded' WHERE run_id = ANY ($1::uuid[]) AND status <> 'adopted';

-- name: leave_blob
DELETE FROM blob_uses AS b USING unnest($1::uuid[], $2::bytea[]) AS u(run_id, digest)
 WHERE b.run_id = u.run_id AND b.digest = u.digest;

-- name: keep_run_blobs
INSERT INTO blobs (created_at, last_referenced_at, tenant_id, digest, media_type, data)
SELECT DISTINCT ON (r.tenant_id, u.digest) coalesce($1::timestamptz, now()),
       coalesce($1::timestamptz, now()), r.tenant_id, u.digest, u.media_type, u.data
  FROM unnest($2::uuid[], $3::bytea[], $4::bytea[], $5::bytea[])
       AS u(run_id, digest, media_type, data)
  JOIN runs AS r ON r.run_id = u.run_id
 ORDER BY r.tenant_id, u.digest
    ON CONFLICT (tenant_id, digest) DO UPDATE
       SET last_referenced_at = greatest(excluded.last_referenced_at, blobs.last_referenced_at);

-- name: use_run_blobs
INSERT INTO blob_uses AS b (run_id, lasts, tenant_id, digest)
SELECT u.run_id, bool_or(u.lasts), r.tenant_id, u.digest
  FROM unnest($1::uuid[], $2::bytea[], $3::bool[]) AS u(run_id, digest, lasts)
  JOIN runs AS r ON r.run_id = u.run_id
 GROUP BY u.run_id, r.tenant_id, u.digest
    ON CONFLICT (run_id, digest) DO UPDATE SET lasts = b.lasts OR excluded.lasts;

-- name: set_ready
INSERT INTO ready (run_id, available_at, priority, required_runtime, suspected, queue, tenant_id,
                   agent_id, agent_version)
SELECT r.run_id, coalesce($1::timestamptz, now()) + u.in_s * interval '1 second', r.priority,
       r.required_runtime, u.suspected, r.queue, r.tenant_id, coalesce(r.active_agent_id, r.agent_id),
       coalesce(r.active_agent_version, r.agent_version)
  FROM unnest($2::uuid[], $3::float8[], $4::boolean[]) AS u(run_id, in_s, suspected)
  JOIN runs AS r ON r.run_id = u.run_id
    ON CONFLICT (run_id) DO UPDATE
       SET available_at = excluded.available_at, suspected = excluded.suspected;

-- name: set_close_timers
INSERT INTO timers (run_id, ref, due_at, kind)
SELECT u.run_id, u.run_id, coalesce($1::timestamptz, now()) + u.in_s * interval '1 second', 'close'
  FROM unnest($2::uuid[], $3::float8[]) AS u(run_id, in_s)
    ON CONFLICT (run_id, kind, ref) DO UPDATE SET due_at = excluded.due_at;

-- name: set_timers
INSERT INTO timers (run_id, ref, due_at, kind)
SELECT u.run_id, u.ref, coalesce($1::timestamptz, now()) + u.in_s * interval '1 second', u.kind
  FROM unnest($2::uuid[], $3::uuid[], $4::float8[], $5::text[]) AS u(run_id, ref, in_s, kind)
    ON CONFLICT (run_id, kind, ref) DO UPDATE SET due_at = excluded.due_at;

-- name: leave_reports
INSERT INTO timers (run_id, ref, due_at, kind)
SELECT u.parent_run_id, u.run_id, coalesce($1::timestamptz, now()), 'child'
  FROM unnest($2::uuid[], $3::uuid[]) AS u(parent_run_id, run_id)
  JOIN run_state AS s ON s.run_id = u.parent_run_id AND s.finished_at IS NULL
    ON CONFLICT (run_id, kind, ref) DO NOTHING;

-- name: hand_over_runs
UPDATE runs AS r SET active_agent_id = u.agent_id, active_agent_version = u.agent_version
  FROM unnest($1::uuid[], $2::text[], $3::text[]) AS u(run_id, agent_id, agent_version)
 WHERE r.run_id = u.run_id;

-- name: sync_deadlines
WITH s AS MATERIALIZED (
    SELECT s.run_id, s.deadline_at
      FROM unnest($1::uuid[]) AS u(run_id) JOIN run_state AS s ON s.run_id = u.run_id
), gone AS (
    DELETE FROM timers AS t USING s
     WHERE t.run_id = s.run_id AND t.kind = 'deadline' AND s.deadline_at IS NULL
)
INSERT INTO timers (run_id, ref, due_at, kind)
SELECT s.run_id, s.run_id, s.deadline_at, 'deadline' FROM s WHERE s.deadline_at IS NOT NULL
    ON CONFLICT (run_id, kind, ref) DO UPDATE SET due_at = excluded.due_at;
