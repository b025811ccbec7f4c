-- Writes that are not commits: the rows are locked and read, `rules` says what becomes of them, and
-- the new values come back as arrays. Locks: `ready`, then `run_state` in run_id order, then the rest.

-- name: lock_run
SELECT s.*, coalesce($2::timestamptz, now()) AS now,
       coalesce($2::timestamptz, clock_timestamp()) AS clock
  FROM run_state AS s WHERE s.run_id = $1::uuid FOR NO KEY UPDATE;

-- name: lock_runs
SELECT s.*, coalesce($2::timestamptz, now()) AS now
  FROM unnest($1::uuid[]) AS w(run_id)
 CROSS JOIN LATERAL (
    SELECT r.* FROM run_state AS r WHERE r.run_id = w.run_id FOR NO KEY UPDATE
 ) AS s;

-- name: lock_free_runs
-- The same without those that somebody else has locked.
SELECT s.*, coalesce($2::timestamptz, now()) AS now
  FROM unnest($1::uuid[]) AS w(run_id)
 CROSS JOIN LATERAL (
    SELECT r.* FROM run_state AS r WHERE r.run_id = w.run_id FOR NO KEY UPDATE SKIP LOCKED
 ) AS s;

-- name: runs_below
-- Unfinished runs below these, not detached from their parents: a tree as it is seen without locks.
WITH RECURSIVE below AS (
    SELECT r.run_id FROM runs AS r
     CROSS JOIN LATERAL (
        SELECT 1 FROM run_state AS s WHERE s.run_id = r.run_id AND s.finished_at IS NULL OFFSET 0
     ) AS unfinished
     WHERE r.parent_run_id = ANY ($1::uuid[]) AND NOT r.detached
    UNION
    SELECT r.run_id FROM below AS b
      JOIN runs AS r ON r.parent_run_id = b.run_id AND NOT r.detached
     CROSS JOIN LATERAL (
        SELECT 1 FROM run_state AS s WHERE s.run_id = r.run_id AND s.finished_at IS NULL OFFSET 0
     ) AS unfinished
)
SELECT run_id FROM below ORDER BY run_id;

-- name: load_hot
SELECT s.* FROM unnest($1::uuid[]) AS w(run_id) JOIN run_state AS s ON s.run_id = w.run_id;

-- name: find_run_keys
SELECT tenant_id, thread_id, max_attempts FROM runs WHERE run_id = $1::uuid;

-- name: claim_candidates
-- Runs suspected of killing their worker are chosen apart: few of them may go together. It goes
-- priority by priority, the larger first, so that those whose time has not come cost nothing,
-- however many they are; an outer order would have all priorities read, and their rows locked.
WITH RECURSIVE levels AS (
    SELECT k.suspected, (
        SELECT q.priority FROM ready AS q WHERE q.suspected = k.suspected
         ORDER BY q.priority DESC LIMIT 1
    ) AS priority
      FROM (VALUES (false), (true)) AS k(suspected)
    UNION ALL
    SELECT l.suspected, (
        SELECT q.priority FROM ready AS q
         WHERE q.suspected = l.suspected AND q.priority < l.priority
         ORDER BY q.priority DESC LIMIT 1
    )
      FROM levels AS l WHERE l.priority IS NOT NULL
), fresh AS MATERIALIZED (
    SELECT f.* FROM levels AS l CROSS JOIN LATERAL (
        SELECT run_id, priority, available_at FROM ready
         WHERE NOT suspected AND priority = l.priority
           AND available_at <= coalesce($1::timestamptz, now())
           AND agent_id || chr(31) || agent_version = ANY ($2::text[])
           AND queue = ANY ($3::text[]) AND required_runtime <= $4
         ORDER BY available_at, run_id
         LIMIT $5 FOR UPDATE SKIP LOCKED
    ) AS f
     WHERE NOT l.suspected
     LIMIT $5
), suspects AS MATERIALIZED (
    SELECT f.* FROM levels AS l CROSS JOIN LATERAL (
        SELECT run_id, priority, available_at FROM ready
         WHERE suspected AND priority = l.priority
           AND available_at <= coalesce($1::timestamptz, now())
           AND agent_id || chr(31) || agent_version = ANY ($2::text[])
           AND queue = ANY ($3::text[]) AND required_runtime <= $4
         ORDER BY available_at, run_id
         LIMIT $6 FOR UPDATE SKIP LOCKED
    ) AS f
     WHERE l.suspected
     LIMIT $6
)
SELECT c.run_id
  FROM (SELECT * FROM fresh UNION ALL SELECT * FROM suspects) AS c
 ORDER BY c.priority DESC, c.available_at, c.run_id
 LIMIT $5;

-- name: lock_ready_runs
SELECT r.*, a.end_reason, coalesce($2::timestamptz, now()) AS now
  FROM unnest($1::uuid[]) AS w(run_id)
 CROSS JOIN LATERAL (
    SELECT s.* FROM run_state AS s WHERE s.run_id = w.run_id FOR NO KEY UPDATE SKIP LOCKED
 ) AS s
 CROSS JOIN LATERAL (
    SELECT n.run_id, n.tenant_id, n.agent_id, n.agent_version, n.thread_id, n.root_run_id,
           n.parent_run_id, n.retry_of, n.forked_from, n.origin_run_id, n.origin_seq, n.depth,
           n.detached, n.active_agent_id, n.active_agent_version,
           n.input, n.context, n.options, n.caller, n.trace_id,
           n.created_at, n.required_runtime, n.schema_version, n.input_position,
           s.state, s.step_index, s.last_seq, s.retained_from_seq, s.attempt, s.faults,
           s.lease_owner, s.lease_token, s.lease_expires_at, s.cancel_epoch, s.cancel_action,
           s.cancel_options, s.parked_on, s.waiting_kind, s.waiting_since, s.wake_at, s.deadline_at, s.deadline_left,
           s.code, s.open_calls, s.open_interrupts, s.open_children, s.counters, s.checkpoint_seq,
           s.terminal_seq, s.started_at, s.finished_at, s.updated_at, s.last_commit_id
      FROM runs AS n WHERE n.run_id = s.run_id
 ) AS r
  LEFT JOIN attempts AS a ON a.run_id = s.run_id AND a.attempt = s.attempt;

-- name: take_runs
WITH u AS MATERIALIZED (
    SELECT * FROM unnest(
        $1::uuid[], $2::timestamptz[], $3::timestamptz[], $4::int[], $5::int[], $6::int[],
        $7::int[], $8::int[], $9::bytea[]
    ) AS u(run_id, at, lease_expires_at, last_seq, attempt, lease_token, epoch, step_index, data)
), taken AS (
    UPDATE run_state AS s
       SET last_seq = u.last_seq, attempt = u.attempt, lease_token = u.lease_token,
           lease_owner = $10, lease_expires_at = u.lease_expires_at, parked_on = NULL,
           wake_at = NULL, updated_at = u.at
      FROM u WHERE s.run_id = u.run_id
), new_attempts AS (
    INSERT INTO attempts (run_id, started_at, attempt, token, worker_id)
    SELECT u.run_id, u.at, u.attempt, u.lease_token, $10 FROM u
), new_events AS (
    INSERT INTO events (run_id, at, seq, step_index, attempt, epoch, type, schema_version, data)
    SELECT u.run_id, u.at, u.last_seq, u.step_index, u.attempt, u.epoch, $11, $12, u.data FROM u
)
DELETE FROM ready AS q USING unnest($13::uuid[]) AS gone(run_id) WHERE q.run_id = gone.run_id;

-- name: renew_leases
WITH l AS MATERIALIZED (
    SELECT w.run_id, w.token FROM unnest($1::uuid[], $2::int[]) AS w(run_id, token)
     CROSS JOIN LATERAL (
        SELECT 1 FROM run_state AS r WHERE r.run_id = w.run_id FOR NO KEY UPDATE SKIP LOCKED
     ) AS held
)
UPDATE run_state AS s
   SET lease_expires_at = coalesce($3::timestamptz, now()) + $4::float8 * interval '1 second'
  FROM l
 WHERE s.run_id = l.run_id AND s.lease_token = l.token AND s.lease_owner = $5
RETURNING s.run_id, s.cancel_epoch;

-- name: find_leases
SELECT s.run_id, s.lease_owner, s.lease_token, s.cancel_epoch
  FROM unnest($1::uuid[]) AS w(run_id) JOIN run_state AS s ON s.run_id = w.run_id;

-- name: expired_leases
-- Those that ran out after the last one of the page before.
SELECT s.*, coalesce($1::timestamptz, now()) AS now,
       (SELECT r.max_attempts FROM runs AS r WHERE r.run_id = s.run_id) AS max_attempts
  FROM run_state AS s
 WHERE s.lease_owner IS NOT NULL AND s.lease_expires_at <= coalesce($1::timestamptz, now())
   AND (s.lease_expires_at, s.run_id) > ($3::timestamptz, $4::uuid)
 ORDER BY s.lease_expires_at, s.run_id LIMIT $2 FOR NO KEY UPDATE OF s SKIP LOCKED;

-- name: move_runs
UPDATE run_state AS s
   SET last_seq = u.last_seq, faults = u.faults, lease_owner = u.lease_owner,
       lease_token = u.lease_token, lease_expires_at = u.lease_expires_at,
       cancel_epoch = u.cancel_epoch, cancel_action = u.cancel_action,
       cancel_options = u.cancel_options, parked_on = u.parked_on, wake_at = u.wake_at,
       updated_at = u.updated_at
  FROM unnest($1::uuid[], $2::int[], $3::int[], $4::text[], $5::int[], $6::timestamptz[], $7::int[],
              $8::text[], $9::smallint[], $10::text[], $11::timestamptz[], $12::timestamptz[])
       AS u(run_id, last_seq, faults, lease_owner, lease_token, lease_expires_at, cancel_epoch,
            cancel_action, cancel_options, parked_on, wake_at, updated_at)
 WHERE s.run_id = u.run_id;

-- name: insert_events
INSERT INTO events (run_id, at, seq, step_index, attempt, epoch, type, schema_version, data)
SELECT u.run_id, u.at, u.seq, u.step_index, u.attempt, u.epoch, u.type, $9, u.data
  FROM unnest($1::uuid[], $2::timestamptz[], $3::int[], $4::int[], $5::int[], $6::int[],
              $7::smallint[], $8::bytea[])
       AS u(run_id, at, seq, step_index, attempt, epoch, type, data);

-- name: end_attempts
UPDATE attempts AS a
   SET ended_at = u.at, end_reason = $5, last_commit_id = u.last_commit_id
  FROM unnest($1::uuid[], $2::int[], $3::timestamptz[], $4::uuid[])
       AS u(run_id, attempt, at, last_commit_id)
 WHERE a.run_id = u.run_id AND a.attempt = u.attempt;

-- name: insert_ready
INSERT INTO ready (run_id, available_at, priority, required_runtime, suspected, queue, tenant_id,
                   agent_id, agent_version)
SELECT r.run_id, u.available_at, r.priority, r.required_runtime, u.suspected, r.queue, r.tenant_id,
       coalesce(r.active_agent_id, r.agent_id), coalesce(r.active_agent_version, r.agent_version)
  FROM unnest($1::uuid[], $2::timestamptz[], $3::boolean[]) AS u(run_id, available_at, suspected)
  JOIN runs AS r ON r.run_id = u.run_id
    ON CONFLICT (run_id) DO UPDATE
       SET available_at = excluded.available_at, suspected = excluded.suspected;

-- name: delete_ready
DELETE FROM ready AS q USING unnest($1::uuid[]) AS gone(run_id) WHERE q.run_id = gone.run_id;

-- name: insert_timers
INSERT INTO timers (run_id, ref, due_at, kind)
SELECT u.run_id, u.ref, u.due_at, u.kind
  FROM unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::text[]) AS u(run_id, ref, due_at, kind)
    ON CONFLICT (run_id, kind, ref) DO UPDATE SET due_at = excluded.due_at;

-- name: delete_timers
DELETE FROM timers AS t USING unnest($1::uuid[], $2::uuid[], $3::text[]) AS u(run_id, ref, kind)
 WHERE t.run_id = u.run_id AND t.kind = u.kind AND t.ref = u.ref;

-- name: insert_late
INSERT INTO late_results (
    tool_call_id, run_id, recorded_at, execution, attempt, epoch, seq, status, external_ref, digest)
VALUES ($1::uuid, $2::uuid, $3, $4, $5, $6, $7, $8, $9, $10);

-- name: find_late
SELECT digest FROM late_results WHERE tool_call_id = $1::uuid AND execution = $2;

-- name: use_blobs
INSERT INTO blob_uses (run_id, lasts, tenant_id, digest)
SELECT u.run_id, true, u.tenant_id, u.digest
  FROM unnest($1::uuid[], $2::text[], $3::bytea[]) AS u(run_id, tenant_id, digest)
    ON CONFLICT (run_id, digest) DO UPDATE SET lasts = true;

-- name: insert_blob
INSERT INTO blobs (created_at, last_referenced_at, tenant_id, digest, media_type, data)
SELECT coalesce($1::timestamptz, now()), coalesce($1::timestamptz, now()), u.tenant_id, u.digest,
       u.media_type, u.data
  FROM unnest($2::text[], $3::bytea[], $4::bytea[], $5::bytea[])
       AS u(tenant_id, digest, media_type, data)
    ON CONFLICT (tenant_id, digest) DO UPDATE
       SET last_referenced_at = greatest(excluded.last_referenced_at, blobs.last_referenced_at);
