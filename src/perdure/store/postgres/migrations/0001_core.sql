-- The core tables. JSON stands as our own UTF-8 bytes and text that others make up stands as UTF-8
-- bytes too (decision 38: U+0000 must survive); ids are bare UUIDs, digests 32 bytes.
-- No index names a column that changes at every step, so that such updates are heap-only.

CREATE TABLE threads (
    thread_id uuid PRIMARY KEY,
    active_run_id uuid,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    last_position integer NOT NULL,
    has_queue boolean NOT NULL DEFAULT false,
    tenant_id text NOT NULL,
    title bytea NOT NULL,
    metadata bytea NOT NULL,
    participants bytea NOT NULL,
    capabilities bytea NOT NULL,
    deleted_at timestamptz
) WITH (fillfactor = 80);
CREATE INDEX threads_by_tenant ON threads (tenant_id, thread_id);
CREATE INDEX threads_deleted ON threads (thread_id) WHERE deleted_at IS NOT NULL;

-- What threads are found by: a digest for each pair of their metadata.
CREATE TABLE thread_tags (
    thread_id uuid NOT NULL,
    tenant_id text NOT NULL,
    digest bytea NOT NULL,
    PRIMARY KEY (tenant_id, digest, thread_id)
);

-- What a thread says of others: behind `from_position` come its own messages, before them what
-- `base_thread_id` says up to `base_position`.
CREATE TABLE thread_bases (
    thread_id uuid NOT NULL,
    base_thread_id uuid NOT NULL,
    run_id uuid,
    created_at timestamptz NOT NULL,
    from_position integer NOT NULL,
    base_position integer NOT NULL,
    kind text NOT NULL CHECK (kind IN ('fork', 'adopt')),
    author bytea NOT NULL,
    PRIMARY KEY (thread_id, from_position)
);
CREATE INDEX thread_bases_by_base ON thread_bases (base_thread_id, thread_id);

CREATE TABLE runs (
    run_id uuid PRIMARY KEY,
    thread_id uuid NOT NULL,
    root_run_id uuid NOT NULL,
    parent_run_id uuid,
    retry_of uuid,
    forked_from uuid,
    origin_run_id uuid,
    depth integer NOT NULL DEFAULT 0,
    detached boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL,
    origin_seq integer,
    input_position integer NOT NULL,
    max_attempts integer NOT NULL,
    required_runtime integer NOT NULL,
    schema_version integer NOT NULL,
    priority integer NOT NULL,
    tenant_id text NOT NULL,
    agent_id text NOT NULL,
    agent_version text NOT NULL,
    active_agent_id text,
    active_agent_version text,
    queue text NOT NULL,
    trace_id text NOT NULL,
    fingerprint bytea NOT NULL,
    idempotency_key bytea,
    input bytea NOT NULL,
    context bytea NOT NULL,
    options bytea NOT NULL,
    caller bytea NOT NULL,
    CHECK ((origin_run_id IS NULL) = (origin_seq IS NULL))
);
CREATE INDEX runs_by_tenant ON runs (tenant_id, run_id);
CREATE INDEX runs_by_thread ON runs (thread_id, input_position);
CREATE INDEX runs_by_parent ON runs (parent_run_id, run_id) WHERE parent_run_id IS NOT NULL;
-- Who shares a run's log: events up to the largest `origin_seq` must be kept as long as these runs.
CREATE INDEX runs_by_origin ON runs (origin_run_id, origin_seq) WHERE origin_run_id IS NOT NULL;
CREATE INDEX runs_by_root ON runs (root_run_id, run_id) WHERE parent_run_id IS NOT NULL;
CREATE UNIQUE INDEX runs_by_key ON runs (tenant_id, agent_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;

-- The hot row. `deadline_left` stands while a person is waited for (the total time stops then).
CREATE TABLE run_state (
    run_id uuid PRIMARY KEY,
    last_commit_id uuid,
    updated_at timestamptz NOT NULL,
    lease_expires_at timestamptz,
    deadline_at timestamptz,
    waiting_since timestamptz,
    wake_at timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    deadline_left interval,
    last_seq integer NOT NULL,
    step_index integer NOT NULL,
    retained_from_seq integer NOT NULL DEFAULT 1,
    attempt integer NOT NULL DEFAULT 0,
    faults integer NOT NULL DEFAULT 0,
    lease_token integer NOT NULL DEFAULT 0,
    cancel_epoch integer NOT NULL DEFAULT 0,
    open_calls integer NOT NULL DEFAULT 0,
    open_interrupts integer NOT NULL DEFAULT 0,
    open_children integer NOT NULL DEFAULT 0,
    checkpoint_seq integer,
    terminal_seq integer,
    state text NOT NULL CHECK (state IN
        ('pending', 'planning', 'executing', 'waiting_human', 'succeeded', 'failed')),
    lease_owner text,
    parked_on text,
    waiting_kind text,
    cancel_action text,
    cancel_options smallint NOT NULL DEFAULT 0,
    code text,
    counters bytea NOT NULL DEFAULT '{}',
    CHECK (state NOT IN ('succeeded', 'failed') OR lease_owner IS NULL AND parked_on IS NULL),
    CHECK ((lease_owner IS NULL) = (lease_expires_at IS NULL)),
    CHECK (terminal_seq <= last_seq),
    CHECK ((state IN ('succeeded', 'failed')) = (finished_at IS NOT NULL))
) WITH (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200,
    autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.1
);
-- Changes at claim and release only; the reaper and the heartbeat find held runs by it.
CREATE INDEX run_state_held ON run_state (lease_owner) WHERE lease_owner IS NOT NULL;
-- Changes at the end of a run only.
CREATE INDEX run_state_unfinished ON run_state (run_id) WHERE finished_at IS NULL;
-- Changes at the end of a run, and when its history goes.
CREATE INDEX run_state_kept ON run_state (run_id, finished_at)
    WHERE retained_from_seq < terminal_seq;

-- What no statement of ours does is refused all the same (decision 9). After the row, and asked in
-- WHEN: a write that is legal calls no function and locks nothing more.
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = TG_ARGV[0];
END $$;

-- A commit may pass through several states at once; every pair it may join follows from the
-- table of transitions: nothing comes back to pending, nothing leaves a terminal state.
CREATE TRIGGER run_state_legal AFTER UPDATE ON run_state FOR EACH ROW
WHEN (new.state <> old.state
      AND (new.state = 'pending' OR old.state = 'succeeded' OR old.state = 'failed'))
EXECUTE FUNCTION refuse_change('illegal transition of a run');

CREATE TRIGGER run_state_final AFTER UPDATE ON run_state FOR EACH ROW
WHEN ((old.state = 'succeeded' OR old.state = 'failed') AND new.code IS DISTINCT FROM old.code)
EXECUTE FUNCTION refuse_change('a terminal run is final');

CREATE TRIGGER run_state_kept AFTER UPDATE ON run_state FOR EACH ROW
WHEN (new.last_seq < old.last_seq)
EXECUTE FUNCTION refuse_change('a seq never goes back');

CREATE VIEW run_rows AS
SELECT r.run_id, r.tenant_id, r.agent_id, r.agent_version, r.thread_id, r.root_run_id,
       r.parent_run_id, r.retry_of, r.forked_from, r.origin_run_id, r.origin_seq, r.depth,
       r.detached, r.active_agent_id, r.active_agent_version,
       r.input, r.context, r.options, r.caller, r.trace_id,
       r.created_at, r.required_runtime, r.schema_version, r.fingerprint, r.input_position,
       r.max_attempts,
       s.state, s.step_index, s.last_seq, s.retained_from_seq, s.attempt, s.faults, s.lease_owner,
       s.lease_token, s.lease_expires_at, s.cancel_epoch, s.cancel_action, s.cancel_options,
       s.parked_on,
       s.waiting_kind, s.waiting_since, s.wake_at, s.deadline_at, s.deadline_left, s.code,
       s.open_calls, s.open_interrupts, s.open_children, s.counters, s.checkpoint_seq,
       s.terminal_seq, s.started_at, s.finished_at, s.updated_at, s.last_commit_id
  FROM runs AS r
  JOIN run_state AS s ON s.run_id = r.run_id;

-- What can be claimed: rows come and go, they never change.
CREATE TABLE ready (
    run_id uuid PRIMARY KEY,
    available_at timestamptz NOT NULL,
    priority integer NOT NULL,
    required_runtime integer NOT NULL,
    suspected boolean NOT NULL,
    queue text NOT NULL,
    tenant_id text NOT NULL,
    agent_id text NOT NULL,
    agent_version text NOT NULL
) WITH (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX ready_in_order ON ready (suspected, priority DESC, available_at, run_id);

CREATE TABLE attempts (
    run_id uuid NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at timestamptz,
    last_commit_id uuid,
    attempt integer NOT NULL,
    token integer NOT NULL,
    worker_id text NOT NULL,
    end_reason text,
    PRIMARY KEY (run_id, attempt)
);

-- Rows of these three are written twice; the room of the first version is to be used again soon.
CREATE TABLE steps (
    run_id uuid NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at timestamptz,
    step_index integer NOT NULL,
    first_seq integer NOT NULL,
    last_seq integer,
    status text NOT NULL,
    PRIMARY KEY (run_id, step_index)
) WITH (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = 100000
);

CREATE TABLE tool_calls (
    tool_call_id uuid PRIMARY KEY,
    run_id uuid NOT NULL,
    step_index integer NOT NULL,
    ordinal integer NOT NULL,
    action_seq integer NOT NULL,
    result_seq integer,
    repeatable boolean NOT NULL,
    needs_approval boolean NOT NULL,
    status text NOT NULL,
    side_effect text,
    tool bytea NOT NULL,
    version text,
    args_digest bytea NOT NULL,
    effective_digest bytea,
    effect_key text NOT NULL,
    external_ref bytea
) WITH (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = 100000
);
CREATE TRIGGER tool_calls_final AFTER UPDATE ON tool_calls FOR EACH ROW
WHEN (new.status <> old.status
      AND old.status NOT IN ('running', 'proposed', 'awaiting_approval', 'pending'))
EXECUTE FUNCTION refuse_change('the outcome of a tool call is final');
CREATE INDEX tool_calls_by_run ON tool_calls (run_id, step_index, ordinal);
COMMENT ON COLUMN tool_calls.effective_digest IS 'null: the same as args_digest';

CREATE TABLE tool_executions (
    tool_call_id uuid NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at timestamptz,
    number integer NOT NULL,
    attempt integer NOT NULL,
    outcome text,
    args_digest bytea,
    PRIMARY KEY (tool_call_id, number)
) WITH (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = 100000
);

COMMENT ON COLUMN tool_executions.args_digest IS 'null: that of the call when it was made';

CREATE TABLE events (
    run_id uuid NOT NULL,
    at timestamptz NOT NULL,
    seq integer NOT NULL,
    step_index integer NOT NULL,
    attempt integer NOT NULL,
    epoch integer NOT NULL,
    type smallint NOT NULL,
    schema_version smallint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (run_id, seq)
);

CREATE TRIGGER events_are_facts BEFORE UPDATE ON events FOR EACH STATEMENT
EXECUTE FUNCTION refuse_change('events never change');

CREATE TABLE checkpoints (
    run_id uuid NOT NULL,
    created_at timestamptz NOT NULL,
    seq integer NOT NULL,
    parent_seq integer,
    step_index integer NOT NULL,
    attempt integer NOT NULL,
    epoch integer NOT NULL,
    schema_version smallint NOT NULL,
    digest bytea NOT NULL,
    agent_state bytea NOT NULL,
    PRIMARY KEY (run_id, seq)
);

CREATE TABLE blobs (
    created_at timestamptz NOT NULL,
    last_referenced_at timestamptz NOT NULL,
    tenant_id text NOT NULL,
    digest bytea NOT NULL,
    media_type bytea NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (tenant_id, digest)
);

-- Which runs use which content; `lasts`: also once the run's history is gone.
CREATE TABLE blob_uses (
    run_id uuid NOT NULL,
    lasts boolean NOT NULL,
    tenant_id text NOT NULL,
    digest bytea NOT NULL,
    PRIMARY KEY (run_id, digest)
);
CREATE INDEX blob_uses_by_content ON blob_uses (tenant_id, digest);

CREATE TABLE messages (
    thread_id uuid NOT NULL,
    message_id uuid NOT NULL,
    run_id uuid,
    created_at timestamptz NOT NULL,
    position integer NOT NULL,
    seq integer,
    tenant_id text NOT NULL,
    role text NOT NULL,
    author bytea NOT NULL,
    body bytea,
    PRIMARY KEY (thread_id, position)
);
CREATE UNIQUE INDEX messages_by_id ON messages (message_id);

CREATE TABLE interrupts (
    interrupt_id uuid PRIMARY KEY,
    run_id uuid NOT NULL,
    tool_call_id uuid,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    answered_at timestamptz,
    opened_seq integer NOT NULL,
    closed_seq integer,
    consumed_by integer,
    tenant_id text NOT NULL,
    kind text NOT NULL,
    status text NOT NULL,
    on_expiry text NOT NULL,
    args_digest bytea,
    definition_digest bytea,
    answer_digest bytea,
    key bytea,
    answer text,
    answered_by bytea
);
CREATE TRIGGER interrupts_final AFTER UPDATE ON interrupts FOR EACH ROW
WHEN (new.status <> old.status AND old.status <> 'pending')
EXECUTE FUNCTION refuse_change('a closed interrupt is final');
CREATE INDEX interrupts_by_run ON interrupts (run_id, interrupt_id);
CREATE INDEX interrupts_by_tenant ON interrupts (tenant_id, interrupt_id);
CREATE INDEX interrupts_pending ON interrupts (tenant_id, interrupt_id) WHERE status = 'pending';
CREATE UNIQUE INDEX interrupts_by_key ON interrupts (run_id, key) WHERE key IS NOT NULL;

CREATE TABLE artifacts (
    artifact_id uuid PRIMARY KEY,
    run_id uuid NOT NULL,
    thread_id uuid NOT NULL,
    tool_call_id uuid,
    created_at timestamptz NOT NULL,
    size bigint NOT NULL,
    version integer NOT NULL,
    step_index integer NOT NULL,
    seq integer NOT NULL,
    tenant_id text NOT NULL,
    status text NOT NULL,
    digest bytea NOT NULL,
    name bytea NOT NULL,
    media_type bytea NOT NULL
);
CREATE INDEX artifacts_by_run ON artifacts (run_id, artifact_id);
CREATE INDEX artifacts_by_thread ON artifacts (thread_id, artifact_id);
CREATE INDEX artifacts_by_tenant ON artifacts (tenant_id, artifact_id);

-- A digest of what is told: an execution may come late in several ways.
CREATE TABLE late_results (
    tool_call_id uuid NOT NULL,
    run_id uuid NOT NULL,
    recorded_at timestamptz NOT NULL,
    execution integer NOT NULL,
    attempt integer NOT NULL,
    epoch integer NOT NULL,
    seq integer NOT NULL,
    status text NOT NULL,
    external_ref bytea,
    digest bytea NOT NULL,
    PRIMARY KEY (tool_call_id, execution, digest)
);
CREATE INDEX late_results_by_run ON late_results (run_id, seq);

-- `ref` is the interrupt of an expiry or a notice, the child of a report, the call of a callback, else the run itself.
CREATE TABLE timers (
    run_id uuid NOT NULL,
    ref uuid NOT NULL,
    due_at timestamptz NOT NULL,
    kind text NOT NULL,
    PRIMARY KEY (run_id, kind, ref)
) WITH (fillfactor = 80);
CREATE INDEX timers_by_due ON timers (due_at);

-- Who gets a run for each publication to a topic of a thread; the runs stand in the inbox.
CREATE TABLE subscriptions (
    thread_id uuid NOT NULL,
    inbox_thread_id uuid NOT NULL,
    created_at timestamptz NOT NULL,
    tenant_id text NOT NULL,
    topic text NOT NULL,
    agent_id text NOT NULL,
    terms bytea NOT NULL,
    caller bytea NOT NULL,
    PRIMARY KEY (thread_id, topic, agent_id)
);
CREATE INDEX subscriptions_by_inbox ON subscriptions (inbox_thread_id);

-- What declared fields that outlive their runs hold. A NULL value: nothing is written any more.
CREATE TABLE state_values (
    run_id uuid NOT NULL,
    updated_at timestamptz NOT NULL,
    version integer NOT NULL,
    position integer NOT NULL,
    seq integer NOT NULL,
    tenant_id text NOT NULL,
    scope text NOT NULL CHECK (scope IN ('thread', 'agent')),
    scope_id text NOT NULL,
    name text COLLATE "C" NOT NULL,
    rule text NOT NULL,
    value bytea,
    PRIMARY KEY (scope, scope_id, tenant_id, name)
) WITH (fillfactor = 80);

CREATE TABLE agents (
    registered_at timestamptz NOT NULL,
    ordinal bigint GENERATED ALWAYS AS IDENTITY,
    agent_id text NOT NULL,
    version text NOT NULL,
    digest bytea NOT NULL,
    card bytea NOT NULL,
    PRIMARY KEY (agent_id, version)
);

CREATE TABLE tools (
    registered_at timestamptz NOT NULL,
    ordinal bigint GENERATED ALWAYS AS IDENTITY,
    name text NOT NULL,
    version text NOT NULL,
    digest bytea NOT NULL,
    spec bytea NOT NULL,
    PRIMARY KEY (name, version)
);
