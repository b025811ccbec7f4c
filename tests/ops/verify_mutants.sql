-- Single faults: what one broken row looks like, for every check.
--
-- Each is run on a copy of the clean history, with triggers, checks and unique indexes off.
-- `:run` and `:other` are the ids of two scenes, `:t_…` the numbers of event types. The header:
--     mutant: check | scene | name | options
-- `other=scene`; `whole`: verify the whole database; `in_s=n`: verify with the liveness checks, so
-- many seconds after the history was made; `journal`: the statements select the keys of effects
-- that are added to the journal of the tools.

-- mutant: I01 | plain | an event after the end
INSERT INTO events SELECT run_id, seq + 1, :t_custom, step_index, at, attempt, epoch,
    schema_version, CAST('{"name":"note"}' AS BLOB) FROM events WHERE run_id = :run ORDER BY seq
    DESC LIMIT 1;
UPDATE run_state SET last_seq = last_seq + 1 WHERE run_id = :run;

-- mutant: I02 | plain | the end is no state event
UPDATE events SET type = :t_custom, data = CAST('{"name":"note"}' AS BLOB) WHERE run_id = :run
    AND seq = (SELECT max(seq) FROM events WHERE run_id = :run);

-- mutant: I02 | plain | a second end
INSERT INTO events SELECT run_id, seq + 1, :t_state, step_index, at, attempt, epoch,
    schema_version, (SELECT data FROM events WHERE run_id = :run AND type = :t_state ORDER BY
    seq DESC LIMIT 1) FROM events WHERE run_id = :run ORDER BY seq DESC LIMIT 1;
UPDATE run_state SET last_seq = last_seq + 1 WHERE run_id = :run;

-- mutant: I02 | plain | terminal_seq names another event
UPDATE run_state SET terminal_seq = 3 WHERE run_id = :run;

-- mutant: I03 | plain | a state event leaves another state
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.from_state', 'pending') AS BLOB)
    WHERE run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run);

-- mutant: I03 | idle | an illegal transition
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.state', 'succeeded') AS BLOB)
    WHERE run_id = :run AND seq = 3;

-- mutant: I03 | idle | a transition that leads elsewhere
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.why', 'next_step') AS BLOB) WHERE
    run_id = :run AND seq = 3;

-- mutant: I04 | plain | an event is missing
DELETE FROM events WHERE run_id = :run AND seq = 7;

-- mutant: I04 | plain | the row counts an event too many
UPDATE run_state SET last_seq = last_seq + 1 WHERE run_id = :run;

-- mutant: I05 | sleeping | the row is in another state
UPDATE run_state SET state = 'executing' WHERE run_id = :run;

-- mutant: I30 | plain | success with an open step
UPDATE steps SET status = 'running' WHERE run_id = :run AND step_index = 1;

-- mutant: I30 | plain | success with an open call
UPDATE tool_calls SET status = 'running' WHERE run_id = :run AND step_index = 1;

-- mutant: I30 | approved | success with an open question
UPDATE interrupts SET status = 'pending' WHERE run_id = :run;

-- mutant: I47 | rejected | a failure without a code
UPDATE run_state SET code = NULL WHERE run_id = :run;

-- mutant: I47 | plain | a success with a code
UPDATE run_state SET code = 'INTERNAL' WHERE run_id = :run;

-- mutant: I47 | plain | an end without a time
UPDATE run_state SET finished_at = NULL WHERE run_id = :run;

-- mutant: I47 | rejected | another code than the log's
UPDATE run_state SET code = 'INTERNAL' WHERE run_id = :run;

-- mutant: I47 | late | cancelled by nobody
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.by', '') AS BLOB) WHERE run_id =
    :run AND type = :t_cancel;

-- mutant: I49 | put aside | a repair without a reason
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.reason', '') AS BLOB) WHERE run_id
    = :run AND type = :t_repair;

-- mutant: I49 | waiting | put aside without a word
UPDATE run_state SET parked_on = 'repair' WHERE run_id = :run;

-- mutant: I82 | returned | an effect lies behind the checkpoint
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.after.seq', 3) AS BLOB)
    WHERE run_id = :run AND type = :t_repair
    AND json_extract(CAST(data AS TEXT), '$.action') = 'return';

-- mutant: I82 | returned | it names another run than its end
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.after.run_id', 'run_x') AS BLOB)
    WHERE run_id = :run AND type = :t_repair
    AND json_extract(CAST(data AS TEXT), '$.action') = 'return';

-- mutant: C1 | returned | what comes after the repair cannot be folded
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.state', 'no state') AS BLOB)
    WHERE run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run);

-- mutant: I82 | plain | it goes on after its end by a repair
UPDATE events SET type = :t_repair, data = CAST('{"type":"repair","action":"fail","by":"ada",'
    || '"reason":"enough"}' AS BLOB) WHERE run_id = :run AND seq = 4;

-- mutant: I82 | after a return | its origin was not returned
UPDATE run_state SET code = 'INTERNAL'
    WHERE run_id = (SELECT origin_run_id FROM runs WHERE run_id = :run);

-- mutant: I82 | goes on | it was to go on in another version, and its origin was cancelled
UPDATE runs SET options = CAST(json_set(CAST(options AS TEXT), '$.idempotency_key',
    'perdure.continues:run_' || lower(hex(retry_of))) AS BLOB) WHERE run_id = :run;
UPDATE run_state SET code = 'RUN_CANCELLED'
    WHERE run_id = (SELECT origin_run_id FROM runs WHERE run_id = :run);

-- mutant: I52 | plain | an older schema after a newer one
UPDATE events SET schema_version = 2 WHERE run_id = :run AND seq = 4;

-- mutant: I52 | undone | an older schema in the middle of a run that was cancelled later
UPDATE events SET schema_version = 2 WHERE run_id = :run AND type NOT IN (:t_state, :t_step,
    :t_result);

-- mutant: H5 | plain | time runs backwards
UPDATE events SET at = at - 3600000000 WHERE run_id = :run AND seq = 7;

-- mutant: H5 | plain | a row older than its log
UPDATE run_state SET updated_at = updated_at - 1 WHERE run_id = :run;

-- mutant: I06 | plain | a call without its action
UPDATE tool_calls SET action_seq = 1 WHERE run_id = :run AND step_index = 1;

-- mutant: I06 | plain | an action without its call
DELETE FROM tool_calls WHERE run_id = :run AND step_index = 1;

-- mutant: I06 | plain | a call of another tool than its action
UPDATE tool_calls SET tool = 'pay' WHERE run_id = :run AND step_index = 1;

-- mutant: I06 | approved | a call with another effect key
UPDATE tool_calls SET effect_key = 'eff_again' WHERE run_id = :run;

-- mutant: I07 | plain | two results
UPDATE events SET type = :t_result, data = ( SELECT data FROM events WHERE run_id = :run AND
    type = :t_result ORDER BY seq LIMIT 1 ) WHERE run_id = :run AND type = :t_step AND
    step_index = 0;

-- mutant: I07 | approved | an ended run with a call without result
UPDATE events SET type = :t_custom, data = CAST('{"name":"note"}' AS BLOB) WHERE run_id = :run
    AND type = :t_result;

-- mutant: I07 | approved | a call names another result
UPDATE tool_calls SET result_seq = 1 WHERE run_id = :run;

-- mutant: I07 | approved | another status than the result's
UPDATE tool_calls SET status = 'failed' WHERE run_id = :run;

-- mutant: I07 | approved | a result that is no outcome
UPDATE tool_calls SET status = 'pending' WHERE run_id = :run;
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.status', 'pending') AS BLOB) WHERE
    run_id = :run AND type = :t_result;

-- mutant: I08 | plain | a result before its action
CREATE TEMP TABLE places AS SELECT (SELECT min(seq) FROM events WHERE run_id = :run AND type =
    :t_action AND step_index = 1) AS a, (SELECT min(seq) FROM events WHERE run_id = :run AND
    type = :t_result AND step_index = 1) AS b;
UPDATE events SET seq = -1 WHERE run_id = :run AND seq = (SELECT a FROM places);
UPDATE events SET seq = (SELECT a FROM places) WHERE run_id = :run AND seq = (SELECT b FROM
    places);
UPDATE events SET seq = (SELECT b FROM places) WHERE run_id = :run AND seq = -1;

-- mutant: I28 | retried | a second payment that nobody decided
DELETE FROM interrupts WHERE run_id = :run;

-- mutant: I28 | retried | a decision that another execution spent
UPDATE interrupts SET consumed_by = 1 WHERE run_id = :run;

-- mutant: I28 | retried | a decision after the second start
UPDATE interrupts SET answered_at = answered_at + 3600000000 WHERE run_id = :run;

-- mutant: I28 | retried | the answer was not to retry
UPDATE interrupts SET answer = 'skip' WHERE run_id = :run;

-- mutant: I29 | approved | success with an unknown outcome
UPDATE tool_calls SET status = 'unknown' WHERE run_id = :run;

-- mutant: I29 | rejected | a failed run with an open call
UPDATE tool_calls SET status = 'awaiting_approval' WHERE run_id = :run;

-- mutant: I35 | edited | executed with other arguments
UPDATE tool_executions SET args_digest = ( SELECT args_digest FROM tool_calls WHERE run_id =
    :run ) WHERE run_id = :run;

-- mutant: I35 | plain | an execution of no call | other=idle
UPDATE tool_calls SET run_id = :other WHERE run_id = :run AND step_index = 1;

-- mutant: I48 | happened | the order's number is lost
UPDATE tool_calls SET external_ref = NULL WHERE run_id = :run;

-- mutant: H6 | retried | an execution is missing
DELETE FROM tool_executions WHERE run_id = :run AND number = 1;

-- mutant: H6 | retried | two executions at once
UPDATE tool_executions SET ended_at = ended_at + 3600000000 WHERE run_id = :run AND number = 1;

-- mutant: H6 | approved | an execution goes on after the result
UPDATE tool_executions SET ended_at = NULL, outcome = NULL WHERE run_id = :run;

-- mutant: I65 | coded | a write by another rule
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.rule', 'max') AS BLOB) WHERE
    run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field');

-- mutant: I65 | coded | a value that its rule does not take
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.value', 'x') AS BLOB) WHERE
    run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field');

-- mutant: I66 | keeps | a field read twice
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value', (
    SELECT json_extract(CAST(e.data AS TEXT), '$.value') FROM events AS e WHERE e.run_id = :run
    AND e.type = :t_custom AND json_extract(CAST(e.data AS TEXT), '$.name') = 'perdure.field_read'
    ORDER BY e.seq LIMIT 1
)) AS BLOB)
WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_read';
UPDATE events SET data = CAST(json_set(
    CAST(data AS TEXT), '$.value', json(json_extract(CAST(data AS TEXT), '$.value'))
) AS BLOB)
WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_read';

-- mutant: I66 | keeps | a value without a version
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.value', 1) AS BLOB) WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_read';

-- mutant: I67 | keeps again | a row that holds something else
UPDATE state_values SET value = CAST('7' AS BLOB) WHERE run_id = :run AND name = 'sum';

-- mutant: I67 | keeps again | a row that is gone
DELETE FROM state_values WHERE run_id = :run AND name = 'sum';

-- mutant: I67 | keeps again | a row at the version before
UPDATE state_values SET version = 1 WHERE run_id = :run AND name = 'sum';

-- mutant: I67 | keeps again | a row of another run | other=keeps
UPDATE state_values SET run_id = :other WHERE run_id = :run AND name = 'sum';

-- mutant: I67 | keeps | a value that its writes do not come to
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.value', 4) AS BLOB) WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_kept'
    AND json_extract(CAST(data AS TEXT), '$.value.field') = 'sum';

-- mutant: I67 | keeps | a value that only Python takes for what its writes come to
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.value', 3.0) AS BLOB) WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_kept'
    AND json_extract(CAST(data AS TEXT), '$.value.field') = 'sum';

-- mutant: I67 | keeps | a version left out
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.version', 9) AS BLOB) WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_kept';

-- mutant: I67 | keeps | a write that was not left
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.name', 'other') AS BLOB) WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_kept';

-- mutant: I67 | keeps | what was left without a write
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.name', 'other') AS BLOB) WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field'
    AND json_extract(CAST(data AS TEXT), '$.value.field') = 'sum';

-- mutant: I67 | keeps not | a failed run that left something
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.name', 'perdure.field_kept') AS BLOB)
WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_read';

-- mutant: I67 | keeps | what was left beside the writes
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.name', 'perdure.field_kept',
    '$.value.field', 'ghost') AS BLOB) WHERE run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_read'
    AND json_extract(CAST(data AS TEXT), '$.value.field') = 'sum';
INSERT INTO state_values SELECT tenant_id, scope, scope_id, 'ghost', version, position, run_id, seq,
    updated_at, rule, value FROM state_values WHERE name = 'sum';

-- mutant: I68 | keeps again | a version that two runs have left | whole
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.version', 1) AS BLOB) WHERE
    run_id = :run AND type = :t_custom
    AND json_extract(CAST(data AS TEXT), '$.name') = 'perdure.field_kept'
    AND json_extract(CAST(data AS TEXT), '$.value.field') = 'sum';

-- mutant: M5 | keeps again | a row that was raised and holds something else
UPDATE state_values SET value = CAST('7' AS BLOB), version = 9 WHERE run_id = :run AND name = 'sum';

-- mutant: M5 | keeps again | a row of an event that is not there
UPDATE state_values SET seq = 999, version = 9 WHERE run_id = :run AND name = 'sum';

-- mutant: M5 | keeps again | a row of no run
UPDATE state_values SET run_id = randomblob(16), version = 9 WHERE run_id = :run AND name = 'sum';

-- mutant: M4 | keeps again | a row of a thread that was raised
UPDATE state_values SET version = 9 WHERE run_id = :run AND name = 'seen';

-- mutant: M4 | keeps again | a value of which its event does not tell
UPDATE state_values SET value = CAST('[]' AS BLOB) WHERE run_id = :run AND name = 'seen';

-- mutant: M4 | keeps again | an event that tells of something else
UPDATE state_values SET seq = 1 WHERE run_id = :run AND name = 'seen';

-- mutant: M4 | keeps again | a position that the thread has not come to
UPDATE state_values SET position = 99 WHERE run_id = :run AND name = 'seen';

-- mutant: H8 | coded | a position twice
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.position', '2.0.0') AS BLOB) WHERE
    run_id = :run AND type = :t_action AND json_extract(CAST(data AS TEXT), '$.position') = '2.1.0';

-- mutant: H8 | coded | a branch that went backwards
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.position', '2.0.7') AS BLOB) WHERE
    run_id = :run AND type = :t_action AND json_extract(CAST(data AS TEXT), '$.position') = '2.0.0';

-- mutant: H8 | coded | an operation beside the one before it
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.position', '2.0.1') AS BLOB) WHERE
    run_id = :run AND type = :t_action AND json_extract(CAST(data AS TEXT), '$.position') = '2.1.0';

-- mutant: C4 | plain | a decision before the result of a call
CREATE TEMP TABLE places AS SELECT (SELECT min(seq) FROM events WHERE run_id = :run AND type =
    :t_result AND step_index = 1) AS a, (SELECT min(seq) FROM events WHERE run_id = :run AND
    type = :t_model AND step_index = 2) AS b;
UPDATE events SET seq = -1 WHERE run_id = :run AND seq = (SELECT a FROM places);
UPDATE events SET seq = (SELECT a FROM places) WHERE run_id = :run AND seq = (SELECT b FROM
    places);
UPDATE events SET seq = (SELECT b FROM places) WHERE run_id = :run AND seq = -1;

-- mutant: C4 | plain | calls out of order
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.ordinal', 5) AS BLOB) WHERE run_id
    = :run AND type = :t_action AND step_index = 1;

-- mutant: I12 | held | two active attempts
INSERT INTO attempts SELECT run_id, 2, token + 1, 'wrk_other', started_at, NULL, NULL, NULL FROM
    attempts WHERE run_id = :run;

-- mutant: I13 | lost | attempts overlap
UPDATE attempts SET ended_at = ended_at + 3600000000 WHERE run_id = :run AND attempt = 1;

-- mutant: I14 | lost | an attempt is missing
DELETE FROM attempts WHERE run_id = :run AND attempt = 1;

-- mutant: I14 | plain | the row counts an attempt too many
UPDATE run_state SET attempt = 2 WHERE run_id = :run;

-- mutant: I15 | lost | a token given twice
UPDATE attempts SET token = 1 WHERE run_id = :run;

-- mutant: I15 | lost | the row's token went back
UPDATE run_state SET lease_token = 1 WHERE run_id = :run;

-- mutant: I16 | lost | a stale worker wrote
UPDATE events SET attempt = 1 WHERE run_id = :run AND seq = (SELECT max(seq) FROM events WHERE
    run_id = :run);

-- mutant: I17 | plain | an event of no attempt
UPDATE events SET attempt = 9 WHERE run_id = :run AND seq = (SELECT max(seq) FROM events WHERE
    run_id = :run);

-- mutant: I17 | plain | an attempt that no event tells of
UPDATE events SET type = :t_custom, data = CAST('{"name":"note"}' AS BLOB) WHERE run_id = :run
    AND seq = 2;

-- mutant: I18 | held | a person is waited for by a holder
UPDATE run_state SET state = 'waiting_human' WHERE run_id = :run;

-- mutant: I19 | buggy | more faults than may be
UPDATE run_state SET faults = 4 WHERE run_id = :run;

-- mutant: I19 | stumbling | more faulty attempts than may be
UPDATE attempts SET end_reason = 'error' WHERE run_id = :run;
UPDATE events SET type = :t_custom, data = CAST('{"name":"note"}' AS BLOB) WHERE run_id = :run
    AND type = :t_step;
UPDATE runs SET options = CAST( json_set(CAST(options AS TEXT), '$.max_attempts', 2) AS BLOB)
    WHERE run_id = :run;

-- mutant: I50 | wobbly | a late result that was in time
UPDATE events SET type = :t_late, data = CAST(json_object( 'tool_call_id', (SELECT 'tc_' ||
    lower(hex((SELECT tool_call_id FROM tool_calls WHERE run_id = :run ORDER BY step_index LIMIT
    1)))), 'execution', 1, 'attempt', 1, 'epoch', 0, 'status', 'succeeded') AS BLOB) WHERE
    run_id = :run AND type = :t_retry;

-- mutant: I50 | late | a late event without its row
DELETE FROM late_results WHERE run_id = :run;

-- mutant: I50 | late | a late row without its event
UPDATE late_results SET seq = 1 WHERE run_id = :run;

-- mutant: H2 | held | held, and no attempt is active
UPDATE attempts SET ended_at = started_at, end_reason = 'parked' WHERE run_id = :run;

-- mutant: H2 | held | held by somebody else
UPDATE run_state SET lease_owner = 'wrk_other' WHERE run_id = :run;

-- mutant: H2 | plain | an attempt ends for no reason
UPDATE attempts SET end_reason = NULL WHERE run_id = :run;

-- mutant: H3 | plain | an ended run in the queue
INSERT INTO ready SELECT run_id, queue, priority, 0, tenant_id, agent_id, agent_version, 1, 0
    FROM runs WHERE run_id = :run;

-- mutant: H3 | plain | an ended run with a timer
INSERT INTO timers VALUES (:run, 'deadline', x'', 0);

-- mutant: H3 | idle | an ended run keeps its thread's turn
UPDATE threads SET active_run_id = :run WHERE thread_id = (SELECT thread_id FROM runs WHERE
    run_id = :run);

-- mutant: H3 | plain | an ended run is held
UPDATE run_state SET lease_owner = 'wrk_x', lease_expires_at = 0 WHERE run_id = :run;

-- mutant: I09 | late | an older epoch after the cancel
UPDATE events SET epoch = 0 WHERE run_id = :run AND type = :t_step;

-- mutant: I10 | late | a model request after the cancel
UPDATE events SET type = :t_model, data = CAST('{"model":"m"}' AS BLOB) WHERE run_id = :run AND
    type = :t_step;

-- mutant: I10 | late | a success after the cancel
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.state', 'succeeded') AS BLOB)
    WHERE run_id = :run AND seq = ( SELECT terminal_seq FROM run_state WHERE run_id = :run);

-- mutant: I10 | late | a checkpoint after the cancel
UPDATE checkpoints SET seq = (SELECT terminal_seq FROM run_state WHERE run_id = :run) WHERE
    run_id = :run AND seq = (SELECT max(seq) FROM checkpoints WHERE run_id = :run);

-- mutant: I10 | late | an execution after the cancel
UPDATE tool_executions SET started_at = started_at + 3600000000 WHERE run_id = :run;

-- mutant: I11 | late | the row is of another epoch
UPDATE run_state SET cancel_epoch = 2 WHERE run_id = :run;

-- mutant: I11 | late | a cancel skips an epoch
UPDATE run_state SET cancel_epoch = 2 WHERE run_id = :run;
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.epoch', 2) AS BLOB) WHERE run_id =
    :run AND type = :t_cancel;

-- mutant: I11 | cancelled queued | the row forgot how it was cancelled
UPDATE run_state SET cancel_action = 'interrupt' WHERE run_id = :run;

-- mutant: I76 | passed on | others are asked than the request names
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.approvers[0]', 'eve') AS BLOB)
WHERE run_id = :run AND type = :t_custom;

-- mutant: I76 | passed on | a closed approval is passed on
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.approval_id', 'int_0') AS BLOB)
WHERE run_id = :run AND type = :t_custom;

-- mutant: I76 | passed on | somebody was told who was not to be
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.phase', 'notified') AS BLOB)
WHERE run_id = :run AND type = :t_custom;

-- mutant: I81 | paused | an update by nobody
UPDATE events SET data = CAST(json_remove(CAST(data AS TEXT), '$.value.by') AS BLOB)
WHERE run_id = :run AND type = :t_custom;

-- mutant: I81 | paused | an update of a run that does not wait
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.state', 'executing') AS BLOB)
WHERE run_id = :run AND type = :t_state
    AND json_extract(CAST(data AS TEXT), '$.state') = 'waiting_human';

-- mutant: I81 | paused | an update of a run that is being cancelled
UPDATE events SET epoch = 1 WHERE run_id = :run AND type = :t_custom;

-- mutant: I81 | paused | an update without a checkpoint
DELETE FROM checkpoints WHERE run_id = :run AND seq = (SELECT max(seq) FROM events
    WHERE run_id = :run AND type = :t_custom);

-- mutant: I81 | paused | two updates under one key
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.value.key', 'one') AS BLOB)
WHERE run_id = :run AND type = :t_custom;

-- mutant: I11 | undone | the row forgot what was asked for
UPDATE run_state SET cancel_options = 0 WHERE run_id = :run;

-- mutant: I73 | undone | nobody asked to undo anything
UPDATE run_state SET cancel_options = 0 WHERE run_id = :run;
UPDATE events SET data = CAST(json_remove(CAST(data AS TEXT), '$.compensate') AS BLOB)
WHERE run_id = :run AND type = :t_cancel;

-- mutant: I73 | undone | a call that did not happen is undone
UPDATE tool_calls SET status = 'failed' WHERE run_id = :run AND tool = 'pay_refundable';

-- mutant: I74 | undone | a second key
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.key', 'other') AS BLOB)
WHERE run_id = :run AND seq = (
    SELECT min(seq) FROM events WHERE run_id = :run AND type = :t_compensation
);

-- mutant: I74 | undone | a try that was not begun
UPDATE events SET type = :t_custom, data = CAST('{"name":"x"}' AS BLOB)
WHERE run_id = :run AND seq = (
    SELECT max(seq) - 1 FROM events WHERE run_id = :run AND type = :t_compensation
);

-- mutant: I74 | undone | one that did not begin has undone it
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.begun', json('false')) AS BLOB)
WHERE run_id = :run AND seq = (
    SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_compensation
);

-- mutant: I75 | undone | the end tells something else
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.status', 'failed') AS BLOB)
WHERE run_id = :run AND seq = (
    SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_compensation
);

-- mutant: I75 | undone | the run ended in the middle of a try
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.status', 'started') AS BLOB)
WHERE run_id = :run AND seq = (
    SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_compensation
);

-- mutant: I44 | plain | a step is missing
UPDATE steps SET step_index = 7 WHERE run_id = :run AND step_index = 2;

-- mutant: I44 | plain | an open step before the last
UPDATE steps SET status = 'running' WHERE run_id = :run AND step_index = 0;

-- mutant: I45 | approving | a call of no step
DELETE FROM steps WHERE run_id = :run;

-- mutant: I46 | plain | a step that is over twice
UPDATE events SET type = :t_step, data = CAST('{"index":0}' AS BLOB) WHERE run_id = :run AND
    type = :t_custom;

-- mutant: I46 | plain | a step that ended otherwise
UPDATE steps SET status = 'failed' WHERE run_id = :run AND step_index = 1;

-- mutant: I46 | plain | a step names another end
UPDATE steps SET last_seq = 1 WHERE run_id = :run AND step_index = 1;

-- mutant: I46 | plain | an end of no step
DELETE FROM steps WHERE run_id = :run AND step_index = 2;

-- mutant: I46 | plain | a step that is over without a time
UPDATE steps SET ended_at = NULL WHERE run_id = :run AND step_index = 2;

-- mutant: I24 | plain | a checkpoint behind the log
UPDATE checkpoints SET seq = seq + 1000 WHERE run_id = :run AND seq = (SELECT max(seq) FROM
    checkpoints WHERE run_id = :run);

-- mutant: I24 | plain | a checkpoint of another epoch
UPDATE checkpoints SET epoch = 1 WHERE run_id = :run;

-- mutant: I24 | plain | a checkpoint at a missing event
DELETE FROM events WHERE run_id = :run AND seq = (SELECT min(seq) FROM checkpoints WHERE run_id
    = :run);

-- mutant: I25 | plain | a checkpoint without its parent
DELETE FROM checkpoints WHERE run_id = :run AND seq = (SELECT min(seq) FROM checkpoints WHERE
    run_id = :run);

-- mutant: I25 | plain | the row names another checkpoint
UPDATE run_state SET checkpoint_seq = 1 WHERE run_id = :run;

-- mutant: I26 | plain | two checkpoints at an event
CREATE TABLE loose AS SELECT * FROM checkpoints;
DROP TABLE checkpoints;
ALTER TABLE loose RENAME TO checkpoints;
INSERT INTO checkpoints SELECT * FROM checkpoints WHERE run_id = :run LIMIT 1;

-- mutant: I31 | waiting | a run waits for nobody
DELETE FROM interrupts WHERE run_id = :run;

-- mutant: I31 | rejected | a question after the end
UPDATE interrupts SET status = 'pending', closed_seq = NULL WHERE run_id = :run;

-- mutant: I31 | waiting | the row names another kind
UPDATE run_state SET waiting_kind = 'auth' WHERE run_id = :run;

-- mutant: I31 | waiting | waiting since nobody knows when
UPDATE run_state SET waiting_since = NULL WHERE run_id = :run;

-- mutant: I32 | asked | a question names another opening
UPDATE interrupts SET opened_seq = 1 WHERE run_id = :run;

-- mutant: I32 | asked | a closed question that no event closes
UPDATE events SET type = :t_custom, data = CAST('{"name":"note"}' AS BLOB) WHERE run_id = :run
    AND type = :t_resume;

-- mutant: I32 | asked | a pending question that an event closes
UPDATE interrupts SET status = 'pending', closed_seq = NULL WHERE run_id = :run;

-- mutant: I32 | asked | an opening without its question
DELETE FROM interrupts WHERE run_id = :run;

-- mutant: I33 | asked | an answer by nobody
UPDATE interrupts SET answered_by = NULL WHERE run_id = :run;

-- mutant: I33 | waiting | a pending question with an answer
UPDATE interrupts SET answer = 'respond' WHERE run_id = :run;

-- mutant: I33 | asked | another answer than the log's
UPDATE interrupts SET answer = 'reject' WHERE run_id = :run;

-- mutant: I34 | edited | an approval of other arguments
UPDATE interrupts SET args_digest = zeroblob(32) WHERE run_id = :run;

-- mutant: I34 | approved | an approval after the start
UPDATE interrupts SET answered_at = answered_at + 3600000000 WHERE run_id = :run;

-- mutant: I34 | approved | an approval that was not spent
UPDATE interrupts SET consumed_by = NULL WHERE run_id = :run;

-- mutant: I34 | approved | an execution after a refusal
UPDATE interrupts SET answer = 'reject' WHERE run_id = :run;

-- mutant: I41 | artist | a version is skipped
UPDATE artifacts SET version = 3 WHERE run_id = :run AND version = 2;

-- mutant: I42 | artist | an artifact without its event
UPDATE events SET type = :t_custom, data = CAST('{"name":"note"}' AS BLOB) WHERE run_id = :run
    AND type = :t_artifact;

-- mutant: I42 | artist | an event without its artifact
DELETE FROM artifacts WHERE run_id = :run AND version = 2;

-- mutant: I42 | artist | an artifact of another size than its event
UPDATE artifacts SET size = 7 WHERE run_id = :run AND version = 2;

-- mutant: I42 | artist | the content is gone
DELETE FROM blobs WHERE digest IN (SELECT digest FROM artifacts WHERE run_id = :run);

-- mutant: I42 | artist | the content was changed
UPDATE blobs SET data = CAST('forged' AS BLOB) WHERE digest IN (SELECT digest FROM artifacts
    WHERE run_id = :run);

-- mutant: I77 | discarded | an artifact that was to be discarded is kept
UPDATE artifacts SET status = 'final' WHERE run_id = :run;

-- mutant: I77 | artist | an artifact is discarded that nobody cancelled
UPDATE artifacts SET status = 'discarded' WHERE run_id = :run AND version = 2;

-- mutant: I43 | artist | content under a path
UPDATE artifacts SET digest = '../../etc/passwd' WHERE run_id = :run AND version = 2;

-- mutant: H7 | big | a large value is gone
DELETE FROM blobs;

-- mutant: H7 | large input | a large input was changed
UPDATE blobs SET data = CAST('"forged"' AS BLOB);

-- mutant: I20 | plain | the root is another run | other=idle
UPDATE runs SET root_run_id = :other WHERE run_id = :run;

-- mutant: I36 | plain | a run of another tenant
UPDATE runs SET tenant_id = 'acme' WHERE run_id = :run;

-- mutant: I36 | plain | a thread of another tenant
UPDATE threads SET tenant_id = 'acme' WHERE thread_id = (SELECT thread_id FROM runs WHERE run_id
    = :run);

-- mutant: I36 | asked | a question of another tenant
UPDATE interrupts SET tenant_id = 'acme' WHERE run_id = :run;

-- mutant: I36 | artist | an artifact of another tenant
UPDATE artifacts SET tenant_id = 'acme' WHERE run_id = :run AND version = 2;

-- mutant: I36 | artist | an artifact of another thread
UPDATE artifacts SET thread_id = zeroblob(16) WHERE run_id = :run AND version = 2;

-- mutant: I36 | approved | a call that went to another run | other=idle
UPDATE tool_calls SET run_id = :other WHERE run_id = :run;

-- mutant: I27 | idle | a key that leads to two runs | other=keyed, whole
UPDATE runs SET options = (SELECT options FROM runs WHERE run_id = :other) WHERE run_id = :run;

-- mutant: I37 | second of thread | two runs of a thread at once | other=plain
UPDATE run_state SET started_at = (SELECT started_at + 1 FROM run_state WHERE run_id = :other)
    WHERE run_id = :run;

-- mutant: I37 | second of thread | a run began behind one that never ended | other=plain
UPDATE run_state SET finished_at = NULL WHERE run_id = :other;

-- mutant: M1 | plain | a message is missing
DELETE FROM messages WHERE run_id = :run AND seq IS NULL;

-- mutant: M1 | idle | an answer that is no message
UPDATE messages SET seq = 1 WHERE run_id = :run AND seq IS NOT NULL;

-- mutant: M1 | idle | a message of another tenant
UPDATE messages SET tenant_id = 'acme' WHERE run_id = :run;

-- mutant: M1 | idle | a thread counts a message too many
UPDATE threads SET last_position = last_position + 1 WHERE thread_id = (SELECT thread_id FROM
    runs WHERE run_id = :run);

-- mutant: H1 | approving | an open call too many
UPDATE run_state SET open_calls = 2 WHERE run_id = :run;

-- mutant: H1 | waiting | an open question too few
UPDATE run_state SET open_interrupts = 0 WHERE run_id = :run;

-- mutant: H1 | plain | a step too many
UPDATE run_state SET step_index = 9 WHERE run_id = :run;

-- mutant: H4 | sleeping | no timer for the deadline
DELETE FROM timers WHERE run_id = :run;

-- mutant: H4 | waiting | no timer for an expiry
DELETE FROM timers WHERE run_id = :run;

-- mutant: H4 | queued | a timer for nothing
INSERT INTO timers VALUES (:run, 'deadline', x'', 0);

-- mutant: H4 | calling | no timer for a callback
DELETE FROM timers WHERE run_id = :run;

-- mutant: H4 | approving | a callback timer of a call that waits for none
INSERT INTO timers SELECT run_id, 'callback', tool_call_id, 0 FROM tool_calls WHERE run_id = :run;

-- mutant: H10 | calling | it waits for a callback, and its execution runs
UPDATE tool_executions SET outcome = NULL, ended_at = NULL WHERE run_id = :run;

-- mutant: H10 | calling | it waits for a callback and was never handed to its tool
DELETE FROM tool_executions WHERE run_id = :run;

-- mutant: L6 | calling | it waits for a callback, and no call does
UPDATE tool_calls SET status = 'running' WHERE run_id = :run;

-- mutant: L6 | calling | a run that waits for a callback can be claimed
INSERT INTO ready SELECT run_id, queue, priority, 0, tenant_id, agent_id, agent_version, 1, 0
    FROM runs WHERE run_id = :run;

-- mutant: I28 | calling | run again while it waits for its callback
INSERT INTO tool_executions SELECT run_id, tool_call_id, number + 1, attempt, args_digest, ended_at,
    ended_at, outcome FROM tool_executions WHERE run_id = :run;

-- mutant: L6 | sleeping | nothing wakes a sleeping run
DELETE FROM ready WHERE run_id = :run;

-- mutant: L6 | delayed | nothing starts a delayed run
DELETE FROM ready WHERE run_id = :run;

-- mutant: H11 | delayed | its row names another time
UPDATE run_state SET wake_at = wake_at + 1 WHERE run_id = :run;

-- mutant: H11 | delayed | it can be claimed at once
UPDATE run_state SET parked_on = NULL, wake_at = NULL WHERE run_id = :run;

-- mutant: H11 | delayed done | it was claimed before its time
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.start_at',
    '2999-01-01T00:00:00.000000Z') AS BLOB) WHERE run_id = :run AND seq = 1;

-- mutant: L6 | waiting | a waiting run can be claimed
INSERT INTO ready SELECT run_id, queue, priority, 0, tenant_id, agent_id, agent_version, 1, 0
    FROM runs WHERE run_id = :run;

-- mutant: L6 | held | a held run can be claimed
INSERT INTO ready SELECT run_id, queue, priority, 0, tenant_id, agent_id, agent_version, 1, 0
    FROM runs WHERE run_id = :run;

-- mutant: L6 | queued | a run queues behind nobody
UPDATE threads SET active_run_id = NULL WHERE thread_id = (SELECT thread_id FROM runs WHERE
    run_id = :run);

-- mutant: L1 | held | an expired lease that nobody takes away | in_s=3600


-- mutant: L3 | waiting | an ending that nobody completes | in_s=3600
INSERT INTO timers (run_id, kind, ref, due_at) SELECT run_id, 'close', x'', updated_at FROM run_state
    WHERE run_id = :run;

-- mutant: L4 | waiting | an expired question that nobody closes | in_s=7200


-- mutant: C1 | plain | the log was changed
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.usage.input_tokens', 11) AS BLOB)
    WHERE run_id = :run AND type = :t_model;

-- mutant: C1 | plain | a checkpoint was changed
UPDATE checkpoints SET digest = zeroblob(32) WHERE run_id = :run;

-- mutant: C1 | plain | the agent's state was changed
UPDATE checkpoints SET agent_state = CAST('{}' AS BLOB) WHERE run_id = :run;

-- mutant: C1 | plain | the row counts otherwise
UPDATE run_state SET model_calls = 2 WHERE run_id = :run;

-- mutant: C1 | plain | an event that does not fit its type
UPDATE events SET data = CAST('{}' AS BLOB) WHERE run_id = :run AND type = :t_model;

-- mutant: C1 | plain | an event of an unknown type
UPDATE events SET type = 99 WHERE run_id = :run AND type = :t_custom;

-- mutant: C6 | plain | NaN
UPDATE events SET data = CAST('{"name":"x","value":NaN}' AS BLOB) WHERE run_id = :run AND type =
    :t_custom;

-- mutant: C6 | plain | a key twice
UPDATE events SET data = CAST('{"name":"x","name":"y"}' AS BLOB) WHERE run_id = :run AND type =
    :t_custom;

-- mutant: C6 | plain | half an emoji
UPDATE events SET data = CAST('{"name":"x","value":"\ud83d"}' AS BLOB) WHERE run_id = :run AND
    type = :t_custom;

-- mutant: C6 | plain | bytes that are no text
UPDATE events SET data = x'7b22ff227d' WHERE run_id = :run AND type = :t_custom;

-- mutant: C6 | plain | NaN in the agent's state
UPDATE checkpoints SET agent_state = CAST('[NaN]' AS BLOB) WHERE run_id = :run;

-- mutant: C6 | plain | a run's row that cannot be read | whole
UPDATE runs SET options = CAST('{' AS BLOB) WHERE run_id = :run;

-- mutant: C6 | plain | a run's row with a text that is not UTF-8 | whole
UPDATE runs SET trace_id = CAST(x'ff' AS TEXT) WHERE run_id = :run;

-- mutant: C6 | plain | an attempt that cannot be read
UPDATE attempts SET end_reason = 'bored' WHERE run_id = :run;

-- mutant: C6 | big | a large value that is no JSON
UPDATE blobs SET data = CAST('{' AS BLOB);

-- mutant: I60 | spoken | a fragment is missing
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.offset', 8001) AS BLOB) WHERE run_id =
    :run AND type = :t_delta AND json_extract(CAST(data AS TEXT), '$.offset') = 8000;

-- mutant: I60 | spoken | a fragment says something again
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.offset', 7999) AS BLOB) WHERE run_id =
    :run AND type = :t_delta AND json_extract(CAST(data AS TEXT), '$.offset') = 8000;

-- mutant: I60 | spoken | a fragment of a lease that was lost
UPDATE events SET attempt = 2 WHERE run_id = :run AND type = :t_delta AND
    json_extract(CAST(data AS TEXT), '$.offset') = 8000;

-- mutant: I60 | spoken | a fragment after the cancel
UPDATE events SET epoch = 1 WHERE run_id = :run AND type = :t_delta AND
    json_extract(CAST(data AS TEXT), '$.offset') = 8000;

-- mutant: I60 | spoken | a fragment after its message
UPDATE events SET type = :t_delta, data = (SELECT CAST(json_set(CAST(data AS TEXT), '$.offset',
    10000, '$.text', 'x') AS BLOB) FROM events WHERE run_id = :run AND type = :t_delta ORDER BY seq
    LIMIT 1) WHERE run_id = :run AND type = :t_action;

-- mutant: I60 | spoken | a fragment without text
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.text', '') AS BLOB) WHERE run_id =
    :run AND type = :t_delta AND json_extract(CAST(data AS TEXT), '$.offset') = 8000;

-- mutant: I60 | spoken | fragments of a run that is not streamed
UPDATE runs SET options = CAST(json_set(CAST(options AS TEXT), '$.stream', json('false')) AS BLOB)
    WHERE run_id = :run;

-- mutant: I61 | spoken | other text was replied than said
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.text', 'none') AS BLOB) WHERE run_id =
    :run AND type = :t_model AND json_extract(CAST(data AS TEXT), '$.text') = 'done';

-- mutant: I61 | spoken | a large text that was not said
UPDATE events SET data = CAST(replace(CAST(data AS TEXT), 'word word', 'work word') AS BLOB) WHERE
    run_id = :run AND type = :t_delta;

-- mutant: I61 | spoken | a message that nobody said
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.message_id', 'msg_0') AS BLOB) WHERE
    run_id = :run AND type = :t_model AND json_extract(CAST(data AS TEXT), '$.text') = 'done';

-- mutant: I70 | goes on | the row names another place than the first event
UPDATE runs SET origin_seq = origin_seq - 1 WHERE run_id = :run;

-- mutant: I70 | goes on | the shared history is gone
DELETE FROM events WHERE run_id = (SELECT origin_run_id FROM runs WHERE run_id = :run) AND seq = 3;

-- mutant: I70 | goes on | the origin is another tenant's
UPDATE runs SET tenant_id = 'another'
    WHERE run_id = (SELECT origin_run_id FROM runs WHERE run_id = :run);

-- mutant: I70 | plain | a first event of a run that shares nothing names an origin
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.origin',
    json('{"run_id":"run_x","seq":1,"mode":"retry"}')) AS BLOB) WHERE run_id = :run AND seq = 1;

-- mutant: I70 | forked | the row says that it is no fork
UPDATE runs SET forked_from = NULL WHERE run_id = :run;

-- mutant: C1 | forked | the edited state was changed
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.origin.state.n', 2) AS BLOB)
    WHERE run_id = :run AND seq = 1;

-- mutant: I71 | goes on | a retry of a run that succeeded | other=plain
UPDATE runs SET retry_of = :other WHERE run_id = :run;

-- mutant: I72 | superseding | it superseded a run of another thread | other=plain
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.supersedes',
    'run_' || lower(hex(:other))) AS BLOB) WHERE run_id = :run AND seq = 1;

-- mutant: I72 | superseding | the run that it superseded was not cancelled so
UPDATE runs SET options = CAST(json_set(CAST(options AS TEXT), '$.multitask_strategy',
    'rollback') AS BLOB) WHERE run_id = :run;

-- mutant: I72 | superseding | a later event names it
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.supersedes', 'run_x') AS BLOB)
    WHERE run_id = :run AND type = :t_state AND seq > 1;

-- mutant: I80 | branched | the base of its thread names another place
UPDATE thread_bases SET base_position = 3, from_position = 3 WHERE thread_id = (SELECT thread_id
    FROM runs WHERE run_id = :run);

-- mutant: I80 | branched | its thread says nothing of the one it branched from
DELETE FROM thread_bases WHERE thread_id = (SELECT thread_id FROM runs WHERE run_id = :run);

-- mutant: I80 | branched | a later event names a branch
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.branch', json_object('thread_id',
    'thr_x', 'position', 0, 'run_id', 'run_x')) AS BLOB) WHERE run_id = :run AND type = :t_state
    AND seq > 1;

-- mutant: M3 | branched | it says more than the thread that it branched from
UPDATE thread_bases SET base_position = 90, from_position = 90 WHERE thread_id = (SELECT thread_id
    FROM runs WHERE run_id = :run);

-- mutant: M3 | branched | the thread that it branched from is gone
UPDATE thread_bases SET base_thread_id = zeroblob(16) WHERE thread_id = (SELECT thread_id FROM runs
    WHERE run_id = :run);

-- mutant: M3 | branched | the fork goes on elsewhere
UPDATE thread_bases SET base_position = base_position - 1 WHERE thread_id = (SELECT thread_id FROM
    runs WHERE run_id = :run);

-- mutant: M3 | branched | it adopts what it says itself
UPDATE thread_bases SET kind = 'adopt' WHERE thread_id = (SELECT thread_id FROM runs WHERE
    run_id = :run);

-- mutant: I44 | goes on | a step that the shared history has
UPDATE steps SET step_index = 0 WHERE run_id = :run AND step_index = 1;

-- mutant: C1 | goes on | the origin's history was changed
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.text', 'other') AS BLOB)
    WHERE run_id = (SELECT origin_run_id FROM runs WHERE run_id = :run) AND type = :t_model;

-- mutant: I20 | plain of family | a child of a parent that is not there
UPDATE runs SET parent_run_id = zeroblob(16) WHERE run_id = :run;

-- mutant: I20 | plain of family | a child at a wrong depth
UPDATE runs SET depth = 2 WHERE run_id = :run;

-- mutant: I20 | family | a root at a depth
UPDATE runs SET depth = 1 WHERE run_id = :run;

-- mutant: I21 | asking of waiting family | a parent that ended before its child | other=waiting family
UPDATE run_state SET state = 'failed', parked_on = NULL WHERE run_id = :other;

-- mutant: I22 | family | a child that was spawned twice
UPDATE events SET data = (SELECT data FROM events WHERE run_id = :run AND type = :t_child ORDER BY
    seq LIMIT 1) WHERE run_id = :run AND seq = (SELECT seq FROM events WHERE run_id = :run AND type
    = :t_child ORDER BY seq LIMIT 1 OFFSET 1);

-- mutant: I22 | family | a child that is another run's | other=plain of family
UPDATE runs SET parent_run_id = NULL WHERE run_id = :other;

-- mutant: I22 | idle | a child that was never spawned | other=plain of family
UPDATE runs SET parent_run_id = :run WHERE run_id = :other;

-- mutant: I23 | family | a result that was never told
UPDATE events SET type = :t_custom, data = CAST('{"name":"note"}' AS BLOB) WHERE run_id = :run
    AND seq = (SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_child);

-- mutant: I23 | family | a result of another state | other=plain of family
UPDATE run_state SET state = 'failed' WHERE run_id = :other;

-- mutant: I23 | family | a result of a detached child | other=plain of family
UPDATE runs SET detached = 1 WHERE run_id = :other;

-- mutant: I63 | talk | a participant changes its thread
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.thread_id',
    'thr_00000000000000000000000000000000') AS BLOB) WHERE run_id = :run AND seq = (SELECT max(seq)
    FROM events WHERE run_id = :run AND type = :t_child
    AND json_extract(CAST(data AS TEXT), '$.phase') = 'spawned');

-- mutant: I63 | talk | a participant's child runs elsewhere | other=plain
UPDATE runs SET thread_id = (SELECT thread_id FROM runs WHERE run_id = :other) WHERE run_id =
    (SELECT max(run_id) FROM runs WHERE parent_run_id = :run);

-- mutant: I63 | talk | two participants share a thread
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.participant', 'c') AS BLOB) WHERE
    run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_child
    AND json_extract(CAST(data AS TEXT), '$.phase') = 'spawned');

-- mutant: I64 | herald | delivered twice to one agent
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.agent_id', 'idle') AS BLOB) WHERE
    run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_child);

-- mutant: I64 | herald | delivered before it was published
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.published_seq', 99) AS BLOB) WHERE
    run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_child);

-- mutant: I64 | herald | delivered from another topic
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.topic', 'other') AS BLOB) WHERE
    run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_child);

-- mutant: I64 | herald | delivered outside of the inbox
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.thread_id',
    'thr_00000000000000000000000000000000') AS BLOB) WHERE run_id = :run AND seq = (SELECT max(seq)
    FROM events WHERE run_id = :run AND type = :t_child);

-- mutant: M2 | herald | a subscription without its inbox | whole
UPDATE subscriptions SET inbox_thread_id = zeroblob(16) WHERE agent_id = 'plain';

-- mutant: M2 | herald | two subscriptions with one inbox | whole
UPDATE subscriptions SET inbox_thread_id = (SELECT inbox_thread_id FROM subscriptions WHERE
    agent_id = 'idle') WHERE agent_id = 'plain';

-- mutant: I39 | family | more calls in the tree than the budget
UPDATE runs SET options = CAST(json_set(CAST(options AS TEXT), '$.budget.tool_calls', 2) AS BLOB)
    WHERE run_id = :run;

-- mutant: I39 | family | a child without a share of the budget | other=plain of family
UPDATE runs SET options = CAST(json_remove(CAST(options AS TEXT), '$.budget') AS BLOB) WHERE
    run_id = :other;

-- mutant: H9 | handed over | carried out by another agent
UPDATE runs SET active_agent_id = 'idle' WHERE run_id = :run;

-- mutant: H9 | idle | handed over without an event
UPDATE runs SET active_agent_id = 'family', active_agent_version = '1' WHERE run_id = :run;

-- mutant: H1 | waiting family | an open child too many
UPDATE run_state SET open_children = 2 WHERE run_id = :run;

-- mutant: L6 | waiting family | it waits for children, and none is open
UPDATE run_state SET open_children = 0 WHERE run_id = :run;

-- mutant: H4 | waiting family | a report of a run that is no child | other=idle
INSERT INTO timers (run_id, kind, ref, due_at) VALUES (:run, 'child', :other, 0);

-- mutant: C1 | waiting family | a child's share is another
UPDATE events SET data = CAST(json_set(CAST(data AS TEXT), '$.use.tool_calls', 1) AS BLOB) WHERE
    run_id = :run AND seq = (SELECT max(seq) FROM events WHERE run_id = :run AND type = :t_child
    AND json_extract(CAST(data AS TEXT), '$.phase') = 'spawned');

-- mutant: I62 | paused | a breakpoint was approved
UPDATE interrupts SET answer = 'approve' WHERE run_id = :run;

-- mutant: I62 | paused | an execution spent a breakpoint
UPDATE interrupts SET consumed_by = 1 WHERE run_id = :run;

-- mutant: I62 | approved | an approval was continued like a breakpoint
UPDATE interrupts SET answer = 'continue' WHERE run_id = :run;

-- mutant: C3 | approved | paid twice | journal
SELECT effect_key FROM tool_calls WHERE run_id = :run;

-- mutant: C3 | retried | a third payment after one retry | journal
SELECT effect_key FROM tool_calls WHERE run_id = :run;

-- mutant: C3 | rejected | paid in spite of a refusal | journal
SELECT effect_key FROM tool_calls WHERE run_id = :run;

-- mutant: C3 | undone | undone twice | journal
SELECT json_extract(CAST(data AS TEXT), '$.key') FROM events WHERE run_id = :run
    AND type = :t_compensation LIMIT 1;

-- mutant: C3 | plain | paid for no call | whole journal
SELECT 'nobody''s key';
