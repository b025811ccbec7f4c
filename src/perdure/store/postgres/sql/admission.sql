-- How runs and threads come to be, and what workers register.

-- name: find_idempotent_run
SELECT * FROM run_rows AS r
 WHERE r.run_id = $1::uuid
    OR r.run_id = (SELECT n.run_id FROM runs AS n
                    WHERE n.tenant_id = $2 AND n.agent_id = $3 AND n.idempotency_key = $4);

-- name: lock_origin
-- Retention waits for the run that is about to share this history, and then finds it.
SELECT retained_from_seq FROM run_state WHERE run_id = $1::uuid FOR SHARE;

-- name: insert_run
-- A group of runs with all that belongs to them. `creates` tells whose thread is new;
-- `active` is the active run of the others' thread, which the caller has locked.
WITH c AS MATERIALIZED (
    SELECT coalesce($1::timestamptz, now()) AS now
), u AS MATERIALIZED (
    SELECT * FROM unnest(
        $4::uuid[], $5::uuid[], $6::uuid[], $7::bool[], $8::bool[], $9::int[], $10::int[],
        $11::int[], $12::int[], $13::text[], $14::text[], $15::text[], $16::text[], $17::text[],
        $18::bytea[], $19::bytea[], $20::bytea[], $21::bytea[], $22::bytea[], $23::bytea[],
        $24::float8[], $25::int[], $26::smallint[], $27::bytea[], $28::bytea[], $29::uuid[],
        $30::uuid[], $31::uuid[], $32::int[], $33::uuid[], $34::uuid[], $35::int[], $36::bool[],
        $37::timestamptz[]
    ) AS u(run_id, thread_id, message_id, creates, queued, position, max_attempts,
           required_runtime, priority, tenant_id, agent_id, agent_version, queue, trace_id,
           fingerprint, idempotency_key, input, context, options, caller,
           run_s, step_index, event_type, event, author, retry_of, forked_from, origin_run_id,
           origin_seq, root_run_id, parent_run_id, depth, detached, start_at)
), new_threads AS (
    INSERT INTO threads (thread_id, active_run_id, created_at, updated_at, last_position, tenant_id,
                         title, metadata, participants, capabilities)
    SELECT u.thread_id, u.run_id, c.now, c.now, u.position, u.tenant_id, '', '{}', '[]', '[]'
      FROM u, c WHERE u.creates
), moved_threads AS (
    UPDATE threads AS t
       SET active_run_id = coalesce(t.active_run_id, u.run_id), last_position = u.position,
           updated_at = greatest(t.updated_at, c.now), has_queue = t.has_queue OR u.queued
      FROM u, c WHERE NOT u.creates AND t.thread_id = u.thread_id
), new_runs AS (
    INSERT INTO runs (run_id, thread_id, root_run_id, created_at, input_position, max_attempts,
                      required_runtime, schema_version, priority, tenant_id, agent_id,
                      agent_version, queue, trace_id, fingerprint, idempotency_key, input, context,
                      options, caller, retry_of, forked_from, origin_run_id, origin_seq,
                      parent_run_id, depth, detached)
    SELECT u.run_id, u.thread_id, u.root_run_id, c.now, u.position, u.max_attempts,
           u.required_runtime, $2, u.priority, u.tenant_id, u.agent_id, u.agent_version, u.queue,
           u.trace_id, u.fingerprint, u.idempotency_key, u.input, u.context, u.options, u.caller,
           u.retry_of, u.forked_from, u.origin_run_id, u.origin_seq, u.parent_run_id, u.depth,
           u.detached
      FROM u, c
), new_states AS (
    INSERT INTO run_state (run_id, updated_at, deadline_at, last_seq, step_index, state, parked_on,
                           wake_at)
    SELECT u.run_id, c.now, c.now + u.run_s * interval '1 second', 1, u.step_index, 'pending',
           CASE WHEN u.queued THEN 'thread' WHEN u.start_at > c.now THEN 'timer' END,
           CASE WHEN u.start_at > c.now THEN u.start_at END
      FROM u, c
), new_messages AS (
    INSERT INTO messages (thread_id, message_id, run_id, created_at, position, tenant_id, role,
                          author)
    SELECT u.thread_id, u.message_id, u.run_id, c.now, u.position, u.tenant_id, 'user', u.author
      FROM u, c
), new_events AS (
    INSERT INTO events (run_id, at, seq, step_index, attempt, epoch, type, schema_version, data)
    SELECT u.run_id, c.now, 1, u.step_index, 0, 0, u.event_type, $3, u.event FROM u, c
), new_timers AS (
    INSERT INTO timers (run_id, ref, due_at, kind)
    SELECT u.run_id, u.run_id, c.now + u.run_s * interval '1 second', 'deadline'
      FROM u, c WHERE u.run_s IS NOT NULL
), new_ready AS (
    INSERT INTO ready (run_id, available_at, priority, required_runtime, suspected, queue,
                       tenant_id, agent_id, agent_version)
    SELECT u.run_id, greatest(c.now, u.start_at), u.priority, u.required_runtime, FALSE, u.queue, u.tenant_id, u.agent_id,
           u.agent_version
      FROM u, c WHERE NOT u.queued
)
SELECT c.now FROM c;

-- name: insert_thread
INSERT INTO threads (thread_id, tenant_id, title, metadata, participants, capabilities,
                     active_run_id, last_position, created_at, updated_at)
VALUES ($1::uuid, $2, $3, $4, $5, $6, $7::uuid, $8, $9, $10)
    ON CONFLICT (thread_id) DO NOTHING RETURNING 1 AS made;

-- name: lock_thread
-- Who asks carries the work of others, so nobody waits here.
SELECT tenant_id, active_run_id, last_position, deleted_at FROM threads WHERE thread_id = $1::uuid
   FOR NO KEY UPDATE NOWAIT;

-- name: next_position
UPDATE threads
   SET last_position = last_position + 1,
       updated_at = greatest(updated_at, coalesce($3::timestamptz, now()))
 WHERE thread_id = $1::uuid AND tenant_id = $2
RETURNING last_position;

-- name: insert_message
INSERT INTO messages (thread_id, message_id, created_at, position, tenant_id, role, author, body)
VALUES ($1::uuid, $2::uuid, coalesce($3::timestamptz, now()), $4, $5, $6, $7, $8)
RETURNING created_at;

-- name: insert_request_key
INSERT INTO request_keys (object_id, created_at, tenant_id, scope, key, fingerprint)
VALUES ($1::uuid, coalesce($2::timestamptz, now()), $3, $4, $5, $6)
    ON CONFLICT (tenant_id, scope, key) DO NOTHING RETURNING 1 AS made;

-- name: find_request_key
SELECT object_id, fingerprint FROM request_keys WHERE tenant_id = $1 AND scope = $2 AND key = $3;

-- name: next_thread_run
-- Runs that work beside the active one are not in the queue: most have begun, or can be claimed; one
-- that was put aside before is told by its options, which the caller reads.
SELECT r.run_id, r.input_position, r.options FROM runs AS r
 CROSS JOIN LATERAL (
    SELECT 1 FROM run_state AS s
     WHERE s.run_id = r.run_id AND s.finished_at IS NULL AND s.started_at IS NULL
       AND s.parked_on IN ('thread', 'closing', 'repair') OFFSET 0
 ) AS unfinished
 WHERE r.thread_id = $1::uuid AND r.input_position > $2 ORDER BY r.input_position LIMIT 1;

-- name: activate_thread
UPDATE threads SET active_run_id = $2::uuid, has_queue = $2::uuid IS NOT NULL
 WHERE thread_id = $1::uuid;

-- name: register_agents
INSERT INTO agents (registered_at, agent_id, version, digest, card)
SELECT coalesce($1::timestamptz, now()), u.agent_id, u.version, u.digest, u.card
  FROM unnest($2::text[], $3::text[], $4::bytea[], $5::bytea[]) AS u(agent_id, version, digest, card)
    ON CONFLICT (agent_id, version) DO UPDATE SET digest = excluded.digest, card = excluded.card
       WHERE agents.digest <> excluded.digest;

-- name: register_tools
INSERT INTO tools (registered_at, name, version, digest, spec)
SELECT coalesce($1::timestamptz, now()), u.name, u.version, u.digest, u.spec
  FROM unnest($2::text[], $3::text[], $4::bytea[], $5::bytea[]) AS u(name, version, digest, spec)
    ON CONFLICT (name, version) DO UPDATE SET digest = excluded.digest, spec = excluded.spec
       WHERE tools.digest <> excluded.digest;
