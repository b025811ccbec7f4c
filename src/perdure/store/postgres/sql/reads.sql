-- What the reader asks. A null argument leaves a condition open; pages go by key. The plans are
-- generic: no condition with `IS NULL OR` finds its rows by an index, so what narrows a list down
-- most has a statement of its own. OFFSET 0 keeps the index of the tenant, which fits as well as long
-- as nothing is known of the rows, from being taken for the one of a run.

-- name: find_runs
SELECT * FROM run_rows WHERE run_id = ANY($1::uuid[]);

-- name: leases_of
SELECT run_id, lease_token FROM run_state WHERE lease_owner = $1 ORDER BY run_id LIMIT $2;

-- name: read_clock
SELECT coalesce($1::timestamptz, now()) AS now;

-- name: list_runs
SELECT * FROM run_rows
 WHERE run_id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AND tenant_id = $2
   AND ($3::text IS NULL OR state = $3) AND ($4::text IS NULL OR agent_id = $4)
 ORDER BY run_id DESC LIMIT $5;

-- name: list_all_runs
SELECT * FROM run_rows
 WHERE run_id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
   AND ($2::text IS NULL OR state = $2) AND ($3::text IS NULL OR agent_id = $3)
 ORDER BY run_id DESC LIMIT $4;

-- name: list_thread_runs
SELECT * FROM run_rows
 WHERE run_id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AND ($2::text IS NULL OR tenant_id = $2)
   AND ($3::text IS NULL OR state = $3) AND ($4::text IS NULL OR agent_id = $4)
   AND thread_id = $5::uuid AND ($6::uuid IS NULL OR parent_run_id = $6)
   AND (NOT $7::bool OR finished_at IS NULL)
 ORDER BY run_id DESC LIMIT $8;

-- name: thread_runs
-- A run's input is the message of it that has no event.
SELECT m.position AS place, r.*
  FROM messages AS m JOIN run_rows AS r ON r.run_id = m.run_id
 WHERE m.thread_id = $1::uuid AND m.position > $2 AND m.run_id IS NOT NULL AND m.seq IS NULL
 ORDER BY m.position LIMIT $3;

-- name: list_child_runs
SELECT * FROM run_rows
 WHERE run_id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AND ($2::text IS NULL OR tenant_id = $2)
   AND ($3::text IS NULL OR state = $3) AND ($4::text IS NULL OR agent_id = $4)
   AND ($5::uuid IS NULL OR thread_id = $5) AND parent_run_id = $6::uuid
   AND (NOT $7::bool OR finished_at IS NULL)
 ORDER BY run_id DESC LIMIT $8;

-- name: list_tree_runs
SELECT * FROM run_rows
 WHERE run_id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AND ($2::text IS NULL OR tenant_id = $2)
   AND root_run_id = $3::uuid AND parent_run_id IS NOT NULL
   AND (NOT $4::bool OR finished_at IS NULL)
 ORDER BY run_id DESC LIMIT $5;

-- name: list_runs_from
SELECT * FROM run_rows
 WHERE run_id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AND ($2::text IS NULL OR tenant_id = $2)
   AND origin_run_id = $3::uuid
 ORDER BY run_id DESC LIMIT $4;

-- name: list_unfinished_runs
SELECT * FROM run_rows
 WHERE run_id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AND ($2::text IS NULL OR tenant_id = $2)
   AND ($3::text IS NULL OR state = $3) AND ($4::text IS NULL OR agent_id = $4)
   AND ($5::uuid IS NULL OR thread_id = $5) AND ($6::uuid IS NULL OR parent_run_id = $6)
   AND finished_at IS NULL AND $7::bool
 ORDER BY run_id DESC LIMIT $8;

-- name: events_after
SELECT seq, type, step_index, at, attempt, epoch, schema_version, data FROM events
 WHERE run_id = $1::uuid AND seq > $2 ORDER BY seq LIMIT $3;

-- name: list_attempts
SELECT run_id, attempt, token, worker_id, started_at, ended_at, end_reason, last_commit_id
  FROM attempts WHERE run_id = $1::uuid ORDER BY attempt;

-- name: list_steps
SELECT step_index, status, first_seq, last_seq, started_at, ended_at FROM steps
 WHERE run_id = $1::uuid AND step_index > $2 ORDER BY step_index LIMIT $3;

-- name: list_tool_calls
SELECT tool_call_id, run_id, step_index, ordinal, tool, version, side_effect, repeatable,
       needs_approval, status, args_digest, effective_digest, effect_key, external_ref, action_seq,
       result_seq
  FROM tool_calls
 WHERE run_id = $1::uuid AND (step_index, ordinal) > ($2::int, $3::int)
 ORDER BY step_index, ordinal, tool_call_id LIMIT $4;

-- name: find_tool_call
SELECT c.tool_call_id, c.run_id, c.step_index, c.ordinal, c.tool, c.version, c.side_effect,
       c.repeatable, c.needs_approval, c.status, c.args_digest, c.effective_digest, c.effect_key,
       c.external_ref, c.action_seq, c.result_seq
  FROM tool_calls AS c JOIN runs AS r ON r.run_id = c.run_id
 WHERE c.tool_call_id = $1::uuid AND r.tenant_id = $2;

-- name: list_executions
SELECT x.tool_call_id, x.number, x.attempt,
       coalesce(x.args_digest, c.args_digest) AS args_digest, x.started_at, x.ended_at, x.outcome
  FROM tool_calls AS c JOIN tool_executions AS x ON x.tool_call_id = c.tool_call_id
 WHERE c.run_id = $1::uuid ORDER BY x.number, x.tool_call_id;

-- name: open_executions
SELECT x.tool_call_id, x.number, x.attempt,
       coalesce(x.args_digest, c.args_digest) AS args_digest, x.started_at, x.ended_at, x.outcome
  FROM tool_calls AS c JOIN tool_executions AS x ON x.tool_call_id = c.tool_call_id
 WHERE c.run_id = $1::uuid
   AND c.status IN ('proposed', 'awaiting_approval', 'running', 'pending')
 ORDER BY x.number, x.tool_call_id;

-- name: list_checkpoints
SELECT run_id, seq, parent_seq, step_index, attempt, epoch, schema_version, digest,
       created_at, agent_state
  FROM checkpoints
 WHERE run_id = $1::uuid AND seq < coalesce($2::int, 2147483647)
 ORDER BY seq DESC LIMIT $3;

-- name: find_checkpoint
SELECT c.run_id, c.seq, c.parent_seq, c.step_index, c.attempt, c.epoch,
       c.schema_version, c.digest, c.created_at, c.agent_state
  FROM checkpoints AS c JOIN runs AS r ON r.run_id = c.run_id
 WHERE c.run_id = $1::uuid AND c.seq = $2 AND r.tenant_id = $3;

-- name: list_interrupts
SELECT interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
       definition_digest, opened_seq, closed_seq, expires_at, on_expiry, answer, answer_digest,
       answered_by, answered_at, consumed_by, created_at
  FROM interrupts
 WHERE tenant_id = $1 AND interrupt_id > coalesce($2::uuid, '00000000-0000-0000-0000-000000000000')
   AND ($3::text IS NULL OR status = $3)
 ORDER BY interrupt_id LIMIT $4;

-- name: list_pending_interrupts
SELECT interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
       definition_digest, opened_seq, closed_seq, expires_at, on_expiry, answer, answer_digest,
       answered_by, answered_at, consumed_by, created_at
  FROM interrupts
 WHERE tenant_id = $1 AND interrupt_id > coalesce($2::uuid, '00000000-0000-0000-0000-000000000000') AND status = 'pending'
 ORDER BY interrupt_id LIMIT $3;

-- name: list_run_interrupts
SELECT interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
       definition_digest, opened_seq, closed_seq, expires_at, on_expiry, answer, answer_digest,
       answered_by, answered_at, consumed_by, created_at
  FROM (
    SELECT * FROM interrupts
     WHERE run_id = $3::uuid AND interrupt_id > coalesce($2::uuid, '00000000-0000-0000-0000-000000000000')
     ORDER BY interrupt_id OFFSET 0
 ) AS of_run
 WHERE tenant_id = $1 AND ($4::text IS NULL OR status = $4)
 ORDER BY interrupt_id LIMIT $5;

-- name: find_interrupt
SELECT interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
       definition_digest, opened_seq, closed_seq, expires_at, on_expiry, answer, answer_digest,
       answered_by, answered_at, consumed_by, created_at
  FROM interrupts
 WHERE interrupt_id = $1::uuid AND ($2::text IS NULL OR tenant_id = $2);

-- name: list_artifacts
SELECT artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
       step_index, tool_call_id, seq, created_at
  FROM artifacts
 WHERE tenant_id = $1 AND artifact_id > coalesce($2::uuid, '00000000-0000-0000-0000-000000000000')
 ORDER BY artifact_id LIMIT $3;

-- name: list_run_artifacts
SELECT artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
       step_index, tool_call_id, seq, created_at
  FROM (
    SELECT * FROM artifacts
     WHERE run_id = $3::uuid AND artifact_id > coalesce($2::uuid, '00000000-0000-0000-0000-000000000000')
     ORDER BY artifact_id OFFSET 0
 ) AS of_run
 WHERE tenant_id = $1 AND ($4::uuid IS NULL OR thread_id = $4)
 ORDER BY artifact_id LIMIT $5;

-- name: list_thread_artifacts
SELECT artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
       step_index, tool_call_id, seq, created_at
  FROM (
    SELECT * FROM artifacts
     WHERE thread_id = $3::uuid AND artifact_id > coalesce($2::uuid, '00000000-0000-0000-0000-000000000000')
     ORDER BY artifact_id OFFSET 0
 ) AS of_thread
 WHERE tenant_id = $1
 ORDER BY artifact_id LIMIT $4;

-- name: find_artifact
SELECT artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
       step_index, tool_call_id, seq, created_at
  FROM artifacts WHERE artifact_id = $1::uuid AND tenant_id = $2;

-- name: read_blob
SELECT data FROM blobs WHERE tenant_id = $1 AND digest = $2;

-- name: find_thread
SELECT thread_id, tenant_id, title, metadata, participants, capabilities, active_run_id,
       last_position, created_at, updated_at, deleted_at
  FROM threads WHERE thread_id = $1::uuid AND tenant_id = $2;

-- name: list_threads
SELECT thread_id, tenant_id, title, metadata, participants, capabilities, active_run_id,
       last_position, created_at, updated_at, deleted_at
  FROM threads
 WHERE deleted_at IS NULL AND tenant_id = $1
   AND thread_id < coalesce($2::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
 ORDER BY thread_id DESC LIMIT $3;

-- name: find_message
SELECT message_id, thread_id, tenant_id, position, run_id, seq, role, author, body, created_at
  FROM messages WHERE message_id = $1::uuid AND ($2::text IS NULL OR tenant_id = $2);

-- name: list_messages
SELECT message_id, thread_id, tenant_id, position, run_id, seq, role, author, body, created_at
  FROM messages
 WHERE thread_id = $1::uuid AND position > $2 AND position <= coalesce($3::int, 2147483647)
 ORDER BY position LIMIT $4;

-- name: list_agents
SELECT agent_id, version, card, registered_at FROM agents ORDER BY agent_id, registered_at, version;

-- name: list_tools
SELECT name, version, spec, registered_at FROM tools ORDER BY name, registered_at, version;

-- name: list_late
SELECT tool_call_id, execution, run_id, attempt, epoch, seq, status, external_ref, recorded_at
  FROM late_results WHERE run_id = $1::uuid ORDER BY seq;

-- name: due_timers
SELECT t.run_id, t.kind, t.ref, t.due_at
  FROM timers AS t
 CROSS JOIN LATERAL (
    SELECT 1 FROM run_state AS s
     WHERE s.run_id = t.run_id AND (s.lease_owner IS NULL OR t.kind IN ('child', 'notice'))
       AND s.parked_on IS DISTINCT FROM 'repair' OFFSET 0
 ) AS unheld
 WHERE t.due_at <= coalesce($1::timestamptz, now())
   AND t.due_at >= coalesce($2::timestamptz, '-infinity')
   AND ($2::timestamptz IS NULL
        OR (t.due_at, t.run_id, t.kind, t.ref) > ($2, $3::uuid, $4::text, $5::uuid))
   AND t.kind = ANY ($6::text[])
 ORDER BY t.due_at, t.run_id, t.kind, t.ref LIMIT $7;

-- name: unmoved_runs
-- One statement, so that all is seen at one moment.
WITH page AS MATERIALIZED (
    SELECT s.run_id, s.last_seq, s.lease_owner, s.parked_on, s.open_interrupts, s.open_children
      FROM run_state AS s
     WHERE s.finished_at IS NULL AND s.run_id > $1::uuid
     ORDER BY s.run_id LIMIT $2
)
SELECT s.run_id, s.last_seq,
       s.lease_owner IS NULL AND s.open_interrupts = 0
       AND coalesce(
           s.parked_on IN ('thread', 'timer', 'retry', 'child', 'callback', 'closing'), true)
       AND (s.parked_on IS DISTINCT FROM 'child' OR s.open_children = 0)
       AND q.yes IS NULL AND t.yes IS NULL AND h.yes IS NULL AS unmoved
  FROM page AS s
  LEFT JOIN LATERAL (
      SELECT true AS yes FROM ready AS q WHERE q.run_id = s.run_id OFFSET 0) AS q ON true
  LEFT JOIN LATERAL (
      SELECT true AS yes FROM timers AS t
       WHERE t.run_id = s.run_id AND t.kind <> 'deadline' LIMIT 1) AS t ON true
  LEFT JOIN LATERAL (
      SELECT true AS yes
        FROM runs AS r
       CROSS JOIN LATERAL (
           SELECT 1 FROM threads AS h
            WHERE h.thread_id = r.thread_id AND h.active_run_id <> s.run_id OFFSET 0) AS other
       WHERE r.run_id = s.run_id AND s.parked_on = 'thread' OFFSET 0) AS h ON true
 ORDER BY s.run_id;

-- name: timers_of
SELECT run_id, kind, ref, due_at FROM timers WHERE run_id = $1::uuid ORDER BY due_at, kind, ref;

-- name: is_ready
SELECT 1 FROM ready WHERE run_id = $1::uuid;

-- name: count_ready
SELECT queue, count(*)::int AS ready,
       greatest(0, extract(epoch FROM coalesce($1::timestamptz, now()) - min(available_at)))::float8
           AS oldest_s
  FROM ready WHERE available_at <= coalesce($1::timestamptz, now()) GROUP BY queue;

-- name: count_interrupts
SELECT count(*)::int AS pending,
       greatest(0, extract(epoch FROM coalesce($1::timestamptz, now()) - min(created_at)))::float8
           AS oldest_s
  FROM interrupts WHERE status = 'pending';

-- name: count_states
SELECT state, count(*)::int AS runs FROM run_state WHERE finished_at IS NULL GROUP BY state;

-- name: ping_runs
SELECT max(version) AS version FROM schema_migrations;
