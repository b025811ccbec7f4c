-- The commit of a batch. Arrays of one length describe its commits ($3 to $25); the other groups of
-- arrays are the rows of one table each, whose first array is the place of the commit in the batch.
-- Locks: run rows in the order of the batch (the adapter sorts it by run id), then their threads,
-- never waiting for either (nor for the threads of new children, `lock_thread`); then the fence is compared on the row itself, as it is under the lock.
-- What stands between /*[part]*/ and /*[]*/ is left out of a batch that has nothing of that part (with
-- `!` of one that has): a statement starts every piece that it has, also over empty arrays, and for
-- a lone commit that was most of its time. The parameters are numbered anew (`optional.py`).
-- What names a row that is not there is an error of the whole statement (NOT NULL, division by
-- zero): the adapter splits the batch and refuses the culprit.

-- name: commit_batch
WITH c AS MATERIALIZED (
    SELECT coalesce($1::timestamptz, clock_timestamp()) AS clock,
           coalesce($1::timestamptz, now()) AS now
), b AS MATERIALIZED (
    SELECT u.run_id, u.commit_id, u.token, coalesce(u.any_holder, false) AS any_holder,
           coalesce(u.epoch, 0) AS epoch, u.from_state, u.expected_seq, u.last_seq, u.state,
           u.step_index, coalesce(u.faults, 0) AS faults, u.parked_on, u.waiting_kind, u.code,
           u.open_calls, coalesce(u.open_interrupts, 0) AS open_interrupts,
           coalesce(u.open_children, 0) AS open_children, u.counters, u.checkpoint_seq,
           coalesce(u.starts, false) AS starts, u.terminal_seq, u.attempt_end, u.ready_in_s,
           coalesce(u.messages, 0) AS messages, u.i
      FROM unnest(
        $3::uuid[], $4::uuid[], $5::int[], $6::bool[], $7::int[], $8::text[], $9::int[],
        $10::int[], $11::text[], $12::int[], $13::int[], $14::text[], $15::text[], $16::text[],
        $17::int[], $18::int[], $19::int[], $20::bytea[], $21::int[], $22::bool[], $23::int[],
        $24::text[], $25::float8[], $26::int[]
    ) WITH ORDINALITY AS u(
        run_id, commit_id, token, any_holder, epoch, from_state, expected_seq,
        last_seq, state, step_index, faults, parked_on, waiting_kind, code,
        open_calls, open_interrupts, open_children, counters, checkpoint_seq, starts, terminal_seq,
        attempt_end, ready_in_s, messages, i)
), l AS MATERIALIZED (
    SELECT b.* FROM b CROSS JOIN LATERAL (
        SELECT 1 FROM run_state AS r WHERE r.run_id = b.run_id FOR NO KEY UPDATE SKIP LOCKED
    ) AS held
/*[thread]*/), q AS MATERIALIZED (
    SELECT l.i, t.thread_id, t.last_position, t.active_run_id = l.run_id AND t.has_queue AS heads_queue,
           row_number() OVER (PARTITION BY t.thread_id ORDER BY l.i) AS place
      FROM l
     CROSS JOIN LATERAL (SELECT n.thread_id FROM runs AS n WHERE n.run_id = l.run_id) AS n
     CROSS JOIN LATERAL (
        SELECT t.* FROM threads AS t WHERE t.thread_id = n.thread_id
           FOR NO KEY UPDATE SKIP LOCKED
     ) AS t
     WHERE l.messages > 0 OR l.terminal_seq IS NOT NULL
/*[]*/), f AS (
    UPDATE run_state AS r
       SET last_commit_id = CASE WHEN l.token IS NULL THEN r.last_commit_id ELSE l.commit_id END,
           updated_at = greatest(c.clock, r.updated_at),
           lease_owner = CASE WHEN l.attempt_end IS NULL THEN r.lease_owner END,
           lease_expires_at = CASE WHEN l.attempt_end IS NULL THEN r.lease_expires_at END,
           deadline_at = CASE
               WHEN l.terminal_seq IS NOT NULL THEN r.deadline_at
               WHEN l.state = 'waiting_human' AND r.state <> 'waiting_human' THEN NULL
               WHEN l.state <> 'waiting_human' AND r.state = 'waiting_human'
                    AND r.deadline_left IS NOT NULL THEN c.now + r.deadline_left
               ELSE r.deadline_at END,
           deadline_left = CASE
               WHEN l.state <> 'waiting_human' THEN NULL
               WHEN r.state = 'waiting_human' THEN r.deadline_left
               ELSE r.deadline_at - c.now END,
           waiting_since = CASE
               WHEN l.state <> 'waiting_human' THEN NULL
               WHEN r.state = 'waiting_human' THEN r.waiting_since
               ELSE greatest(c.clock, r.updated_at) END,
           wake_at = CASE
               WHEN l.ready_in_s > 0 AND l.terminal_seq IS NULL
                    AND (r.lease_owner IS NULL OR l.attempt_end IS NOT NULL)
               THEN c.now + l.ready_in_s * interval '1 second' END,
           started_at = coalesce(
               r.started_at, CASE WHEN l.starts THEN greatest(c.clock, r.updated_at) END),
           finished_at = CASE WHEN l.terminal_seq IS NOT NULL
               THEN greatest(c.clock, r.updated_at) END,
           last_seq = l.last_seq, step_index = l.step_index, faults = l.faults,
           open_calls = l.open_calls, open_interrupts = l.open_interrupts,
           open_children = l.open_children, checkpoint_seq = l.checkpoint_seq,
           terminal_seq = l.terminal_seq, state = l.state, parked_on = l.parked_on,
           waiting_kind = l.waiting_kind, code = l.code, counters = l.counters
      FROM c CROSS JOIN l /*[thread]*/LEFT JOIN q ON q.i = l.i/*[]*/
     WHERE r.run_id = l.run_id
       AND r.last_commit_id IS DISTINCT FROM l.commit_id
       AND CASE WHEN l.token IS NULL THEN l.any_holder = (r.lease_owner IS NOT NULL)
                ELSE r.lease_owner IS NOT NULL AND r.lease_token = l.token END
       AND r.cancel_epoch = l.epoch AND r.state = l.from_state AND r.last_seq = l.expected_seq
       AND r.state NOT IN ('succeeded', 'failed')
       AND (l.state <> 'pending' OR r.state = 'pending')
       AND (l.terminal_seq IS NULL OR r.lease_owner IS NULL OR l.attempt_end IS NOT NULL)
       AND (l.attempt_end IS NULL OR l.token IS NOT NULL)
       /*[thread]*/AND (l.messages = 0 AND l.terminal_seq IS NULL
            OR q.place = 1 AND ($2::bool OR l.terminal_seq IS NULL OR NOT q.heads_queue))/*[]*/
    RETURNING l.i, r.run_id, r.attempt, r.updated_at AS at, l.commit_id, l.attempt_end,
              l.terminal_seq, l.messages, r.lease_owner IS NOT NULL AS held
              /*[thread]*/, q.thread_id, q.last_position, q.heads_queue/*[]*/
), g AS MATERIALIZED (
    SELECT array_agg(x.attempt ORDER BY x.i) AS attempt, array_agg(x.at ORDER BY x.i) AS at
      FROM (SELECT u.i, max(u.attempt) AS attempt, max(u.at) AS at
              FROM (SELECT f.i, f.attempt, f.at FROM f
                    UNION ALL SELECT b.i, -1, '-infinity' FROM b) AS u
             GROUP BY u.i) AS x
), new_events AS (
    INSERT INTO events (run_id, at, seq, step_index, attempt, epoch, type, schema_version, data)
    SELECT ($3::uuid[])[u.i], g.at[u.i], u.seq, u.step_index, g.attempt[u.i], coalesce(($7::int[])[u.i], 0),
           u.type, $27::int, u.data
      FROM g CROSS JOIN unnest($28::int[], $29::int[], $30::int[], $31::smallint[], $32::bytea[])
                        AS u(i, seq, step_index, type, data)
     WHERE g.attempt[u.i] >= 0
/*[steps]*/), changed_steps AS (
    INSERT INTO steps (run_id, started_at, ended_at, step_index, first_seq, last_seq, status)
    SELECT ($3::uuid[])[u.i], g.at[u.i],
           CASE WHEN u.status IN ('succeeded', 'failed', 'cancelled') THEN g.at[u.i] END,
           u.step_index, u.first_seq, u.last_seq, u.status
      FROM g CROSS JOIN unnest($33::int[], $34::int[], $35::int[], $36::int[], $37::text[])
                        AS u(i, step_index, first_seq, last_seq, status)
     WHERE g.attempt[u.i] >= 0
    ON CONFLICT (run_id, step_index) DO UPDATE
       SET status = excluded.status, last_seq = coalesce(excluded.last_seq, steps.last_seq),
           ended_at = CASE WHEN excluded.ended_at IS NOT NULL
               THEN coalesce(steps.ended_at, excluded.ended_at) END
/*[]*//*[calls]*/), new_calls AS (
    INSERT INTO tool_calls (
        tool_call_id, run_id, step_index, ordinal, action_seq, result_seq, repeatable,
        needs_approval, status, side_effect, tool, version, args_digest, effective_digest,
        effect_key, external_ref)
    SELECT u.tool_call_id, ($3::uuid[])[u.i], u.step_index, u.ordinal, u.action_seq, u.result_seq,
           u.repeatable, coalesce(u.needs_approval, false), u.status, u.side_effect, u.tool, u.version,
           u.args_digest, u.effective_digest, u.effect_key, u.external_ref
      FROM g CROSS JOIN unnest(
               $38::int[], $39::uuid[], $40::int[], $41::int[], $42::int[], $43::int[], $44::bool[],
               $45::bool[], $46::text[], $47::text[], $48::bytea[], $49::text[], $50::bytea[],
               $51::bytea[], $52::text[], $53::bytea[]
           ) AS u(i, tool_call_id, step_index, ordinal, action_seq, result_seq, repeatable,
                  needs_approval, status, side_effect, tool, version, args_digest,
                  effective_digest, effect_key, external_ref)
     WHERE g.attempt[u.i] >= 0
/*[]*//*[call_updates]*/), changed_calls AS (
    UPDATE tool_calls AS t
       SET status = u.status, result_seq = coalesce(u.result_seq, t.result_seq),
           effective_digest = coalesce(u.effective_digest, t.effective_digest),
           external_ref = coalesce(u.external_ref, t.external_ref)
      FROM g CROSS JOIN unnest($54::int[], $55::uuid[], $56::text[], $57::int[], $58::bytea[],
                               $59::bytea[])
                        AS u(i, tool_call_id, status, result_seq, effective_digest, external_ref)
     WHERE g.attempt[u.i] >= 0
       AND t.tool_call_id = u.tool_call_id AND t.run_id = ($3::uuid[])[u.i]
    RETURNING 1
/*[]*//*[executions]*/), new_executions AS (
    INSERT INTO tool_executions (
        tool_call_id, started_at, ended_at, number, attempt, outcome, args_digest)
    SELECT u.tool_call_id, g.at[u.i], CASE WHEN u.outcome IS NOT NULL THEN g.at[u.i] END,
           CASE WHEN u.tool_call_id = ANY ($39::uuid[]) THEN u.number ELSE (
               SELECT u.number FROM tool_calls AS t
                WHERE t.tool_call_id = u.tool_call_id AND t.run_id = ($3::uuid[])[u.i]
           ) END,
           g.attempt[u.i], u.outcome, u.args_digest
      FROM g CROSS JOIN unnest($60::int[], $61::uuid[], $62::int[], $63::bytea[], $64::text[])
                        AS u(i, tool_call_id, number, args_digest, outcome)
     WHERE g.attempt[u.i] >= 0
/*[]*//*[execution_ends]*/), ended_executions AS (
    UPDATE tool_executions AS x SET ended_at = g.at[u.i], outcome = u.outcome
      FROM g CROSS JOIN unnest($65::int[], $66::uuid[], $67::int[], $68::text[])
                        AS u(i, tool_call_id, number, outcome)
     WHERE g.attempt[u.i] >= 0 AND x.tool_call_id = u.tool_call_id AND x.number = u.number
    RETURNING 1
/*[]*//*[checkpoints]*/), new_checkpoints AS (
    INSERT INTO checkpoints (
        run_id, created_at, seq, parent_seq, step_index, attempt, epoch,
        schema_version, digest, agent_state)
    SELECT ($3::uuid[])[u.i], g.at[u.i], u.seq, u.parent_seq, u.step_index,
           g.attempt[u.i], coalesce(($7::int[])[u.i], 0), $27::int, u.digest, u.agent_state
      FROM g CROSS JOIN unnest($69::int[], $70::int[], $71::int[], $72::int[], $73::bytea[],
                               $74::bytea[])
                        AS u(i, seq, parent_seq, step_index, digest, agent_state)
     WHERE g.attempt[u.i] >= 0
/*[]*//*[attempts]*/), ended_attempts AS (
    UPDATE attempts AS a
       SET ended_at = f.at, end_reason = f.attempt_end, last_commit_id = f.commit_id
      FROM f
     WHERE f.attempt_end IS NOT NULL AND a.run_id = f.run_id AND a.attempt = f.attempt
/*[]*//*[thread]*/), moved_threads AS (
    UPDATE threads AS t
       SET last_position = t.last_position + f.messages,
           updated_at = CASE WHEN f.messages > 0
               THEN greatest(f.at, t.updated_at) ELSE t.updated_at END,
           active_run_id = CASE WHEN f.terminal_seq IS NOT NULL AND t.active_run_id = f.run_id
                                THEN NULL ELSE t.active_run_id END
      FROM f
     WHERE f.thread_id IS NOT NULL AND t.thread_id = f.thread_id
/*[]*//*[messages]*/), new_messages AS (
    INSERT INTO messages (
        thread_id, message_id, run_id, created_at, position, seq, tenant_id, role, author)
    SELECT f.thread_id, u.message_id, f.run_id, f.at, f.last_position + u.place, u.seq,
           n.tenant_id, u.role, u.author
      FROM unnest($75::int[], $76::uuid[], $77::int[], $78::int[], $79::text[], $80::bytea[])
           AS u(i, message_id, place, seq, role, author)
      JOIN f ON f.i = u.i
     CROSS JOIN LATERAL (SELECT n.tenant_id FROM runs AS n WHERE n.run_id = f.run_id) AS n
/*[]*//*[ends]*/), gone_timers AS (
    DELETE FROM timers AS t USING f
     WHERE f.terminal_seq IS NOT NULL AND t.run_id = f.run_id
/*[]*/)
SELECT f.i::int AS i, f.at, f.held,
       /*[thread]*/CASE WHEN f.heads_queue AND f.terminal_seq IS NOT NULL THEN f.thread_id END AS/*[]*/
       /*[!thread]*/NULL::uuid AS/*[]*/ queue_of
  FROM f
 WHERE 1 / CASE WHEN true
       /*[call_updates]*/AND (SELECT count(*) FROM changed_calls)
                   = (SELECT count(*) FROM g CROSS JOIN unnest($54::int[]) AS u(i)
                       WHERE g.attempt[u.i] >= 0)/*[]*/
       /*[execution_ends]*/AND (SELECT count(*) FROM ended_executions)
                   = (SELECT count(*) FROM g CROSS JOIN unnest($65::int[]) AS u(i)
                       WHERE g.attempt[u.i] >= 0)/*[]*/
           THEN 1 ELSE 0 END = 1;
