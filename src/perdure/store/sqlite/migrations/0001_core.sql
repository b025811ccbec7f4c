-- The core: runs, their log and what stands beside it.
--
-- Ids are the 16 bytes of their UUID, digests their 32 bytes (ANY: a text that is not 64 hex
-- digits is kept as it is), times whole microseconds since 1970 in UTC, payloads our own UTF-8
-- JSON. Checks are chains of OR, the common word first: IN (…) would build a table of its words at
-- each statement (a third of the cost of the hot UPDATE). Rows of a kilobyte stand in ordinary
-- tables; WITHOUT ROWID would spill them into overflow pages. Rows of fewer than 200 bytes that are
-- found by their key alone have no other copy of it.

CREATE TABLE runs (
    run_id BLOB NOT NULL PRIMARY KEY CHECK (length(run_id) = 16),
    tenant_id TEXT NOT NULL,
    agent_id TEXT NOT NULL,
    agent_version TEXT NOT NULL,
    thread_id BLOB NOT NULL CHECK (length(thread_id) = 16),
    root_run_id BLOB NOT NULL CHECK (length(root_run_id) = 16),
    parent_run_id BLOB CHECK (length(parent_run_id) = 16),
    retry_of BLOB CHECK (length(retry_of) = 16),
    forked_from BLOB CHECK (length(forked_from) = 16),
    origin_run_id BLOB CHECK (length(origin_run_id) = 16),
    origin_seq INTEGER,
    depth INTEGER NOT NULL,
    detached INTEGER NOT NULL,
    active_agent_id TEXT,
    active_agent_version TEXT,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    required_runtime INTEGER NOT NULL,
    schema_version INTEGER NOT NULL,
    input_position INTEGER NOT NULL,
    trace_id TEXT NOT NULL,
    idempotency_key TEXT,
    fingerprint TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    input BLOB NOT NULL,
    context BLOB NOT NULL,
    options BLOB NOT NULL,
    caller BLOB NOT NULL,
    CHECK ((origin_run_id IS NULL) = (origin_seq IS NULL))
) STRICT;

CREATE UNIQUE INDEX runs_by_idempotency_key ON runs (tenant_id, agent_id, idempotency_key)
WHERE idempotency_key IS NOT NULL;
CREATE INDEX runs_by_thread ON runs (thread_id, run_id);
CREATE INDEX runs_by_parent ON runs (parent_run_id, run_id) WHERE parent_run_id IS NOT NULL;
-- Who shares a run's log: events up to the largest `origin_seq` must be kept as long as these runs.
CREATE INDEX runs_by_origin ON runs (origin_run_id, origin_seq) WHERE origin_run_id IS NOT NULL;
CREATE INDEX runs_by_root ON runs (root_run_id, run_id) WHERE parent_run_id IS NOT NULL;

CREATE TABLE run_state (
    run_id BLOB NOT NULL PRIMARY KEY CHECK (length(run_id) = 16),
    state TEXT NOT NULL CHECK (
        state = 'planning'
        OR state = 'executing'
        OR state = 'pending'
        OR state = 'waiting_human'
        OR state = 'succeeded'
        OR state = 'failed'
    ),
    step_index INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    retained_from_seq INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    faults INTEGER NOT NULL,
    lease_owner TEXT,
    lease_token INTEGER NOT NULL,
    lease_expires_at INTEGER,
    cancel_epoch INTEGER NOT NULL,
    cancel_action TEXT,
    parked_on TEXT,
    waiting_kind TEXT,
    waiting_since INTEGER,
    wake_at INTEGER,
    deadline_at INTEGER,
    code TEXT,
    open_calls INTEGER NOT NULL CHECK (open_calls >= 0),
    open_interrupts INTEGER NOT NULL CHECK (open_interrupts >= 0),
    open_children INTEGER NOT NULL CHECK (open_children >= 0),
    model_calls INTEGER NOT NULL,
    tool_calls INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    cost REAL NOT NULL,
    waiting_ms INTEGER NOT NULL,
    retries INTEGER NOT NULL,
    checkpoint_seq INTEGER,
    terminal_seq INTEGER,
    started_at INTEGER,
    finished_at INTEGER,
    updated_at INTEGER NOT NULL,
    last_commit_id BLOB,
    deadline_left INTEGER,
    cancel_options INTEGER NOT NULL DEFAULT 0,
    CHECK ((lease_owner IS NULL) = (lease_expires_at IS NULL)),
    CHECK (
        (state <> 'succeeded' AND state <> 'failed')
        OR (lease_owner IS NULL AND parked_on IS NULL)
    ),
    CHECK (last_seq >= 0 AND (terminal_seq IS NULL OR terminal_seq <= last_seq))
) STRICT, WITHOUT ROWID;

-- Changes at claim and release only.
CREATE INDEX run_state_held ON run_state (lease_owner) WHERE lease_owner IS NOT NULL;
-- Changes at the end only.
CREATE INDEX run_state_unfinished ON run_state (run_id) WHERE finished_at IS NULL;

-- A commit may pass through several states at once; every pair it may join follows from the
-- table of transitions: nothing comes back to pending, nothing leaves a terminal state.
CREATE TRIGGER run_state_legal BEFORE UPDATE OF state ON run_state
WHEN new.state <> old.state
    AND (new.state = 'pending' OR old.state = 'succeeded' OR old.state = 'failed')
BEGIN
    SELECT raise(ABORT, 'illegal transition of a run');
END;

CREATE TRIGGER run_state_final BEFORE UPDATE OF code, lease_owner, parked_on ON run_state
WHEN (old.state = 'succeeded' OR old.state = 'failed') AND (
    new.code IS NOT old.code OR new.lease_owner IS NOT NULL OR new.parked_on IS NOT NULL
)
BEGIN
    SELECT raise(ABORT, 'a terminal run is final');
END;

CREATE TRIGGER run_state_kept BEFORE UPDATE OF last_seq ON run_state
WHEN new.last_seq < old.last_seq
BEGIN
    SELECT raise(ABORT, 'a seq never goes back');
END;

CREATE VIEW run_rows AS
SELECT
    r.run_id, r.tenant_id, r.agent_id, r.agent_version, r.thread_id, r.root_run_id,
    r.parent_run_id, r.retry_of, r.forked_from, r.origin_run_id, r.origin_seq, r.input, r.context,
    r.options, r.caller, r.trace_id, r.created_at, r.required_runtime, r.schema_version,
    s.state, s.step_index, s.last_seq, s.retained_from_seq, s.attempt, s.faults, s.lease_owner,
    s.lease_token, s.lease_expires_at, s.cancel_epoch, s.cancel_action, s.parked_on,
    s.waiting_kind, s.waiting_since, s.wake_at, s.deadline_at, s.code, s.open_calls,
    s.open_interrupts, s.open_children, s.model_calls, s.tool_calls, s.input_tokens,
    s.output_tokens, s.cost, s.waiting_ms, s.retries, s.checkpoint_seq, s.terminal_seq,
    s.started_at, s.finished_at, s.updated_at, s.last_commit_id, s.deadline_left,
    s.cancel_options, r.fingerprint, r.input_position, r.max_attempts, r.depth, r.detached, r.active_agent_id,
    r.active_agent_version
FROM runs AS r
INNER JOIN run_state AS s ON s.run_id = r.run_id;

-- What can be claimed; rows are inserted and deleted, never changed.
CREATE TABLE ready (
    run_id BLOB NOT NULL PRIMARY KEY,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    available_at INTEGER NOT NULL,
    tenant_id TEXT NOT NULL,
    agent_id TEXT NOT NULL,
    agent_version TEXT NOT NULL,
    required_runtime INTEGER NOT NULL,
    suspected INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX ready_in_order ON ready (queue, suspected, priority DESC, available_at, run_id);

-- Runs that wait for an earlier run of their thread, in order of their input's place in it.
CREATE TABLE thread_queue (
    thread_id BLOB NOT NULL,
    position INTEGER NOT NULL,
    run_id BLOB NOT NULL,
    PRIMARY KEY (thread_id, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE attempts (
    run_id BLOB NOT NULL,
    attempt INTEGER NOT NULL,
    token INTEGER NOT NULL,
    worker_id TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    end_reason TEXT,
    last_commit_id BLOB,
    PRIMARY KEY (run_id, attempt)
) STRICT, WITHOUT ROWID;

CREATE TABLE steps (
    run_id BLOB NOT NULL,
    step_index INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (
        status = 'running'
        OR status = 'succeeded'
        OR status = 'pending'
        OR status = 'waiting'
        OR status = 'failed'
        OR status = 'cancelled'
    ),
    first_seq INTEGER NOT NULL,
    last_seq INTEGER,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    PRIMARY KEY (run_id, step_index)
) STRICT, WITHOUT ROWID;

CREATE TABLE tool_calls (
    tool_call_id BLOB NOT NULL UNIQUE CHECK (length(tool_call_id) = 16),
    run_id BLOB NOT NULL CHECK (length(run_id) = 16),
    step_index INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    tool TEXT NOT NULL,
    version TEXT,
    side_effect TEXT,
    repeatable INTEGER NOT NULL,
    needs_approval INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (
        status = 'running'
        OR status = 'succeeded'
        OR status = 'pending'
        OR status = 'proposed'
        OR status = 'awaiting_approval'
        OR status = 'partial'
        OR status = 'failed'
        OR status = 'timed_out'
        OR status = 'cancelled'
        OR status = 'denied'
        OR status = 'unknown'
    ),
    args_digest ANY NOT NULL,
    effective_digest ANY,
    effect_key ANY NOT NULL,
    external_ref TEXT,
    action_seq INTEGER NOT NULL,
    result_seq INTEGER,
    PRIMARY KEY (run_id, step_index, ordinal)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER tool_calls_final BEFORE UPDATE OF status ON tool_calls
WHEN new.status <> old.status
    AND old.status <> 'running' AND old.status <> 'proposed'
    AND old.status <> 'awaiting_approval' AND old.status <> 'pending'
BEGIN
    SELECT raise(ABORT, 'the outcome of a tool call is final');
END;

-- No digest: the arguments are those of the call as it was decided.
CREATE TABLE tool_executions (
    run_id BLOB NOT NULL,
    tool_call_id BLOB NOT NULL,
    number INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    args_digest ANY,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    outcome TEXT,
    PRIMARY KEY (run_id, tool_call_id, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    run_id BLOB NOT NULL,
    seq INTEGER NOT NULL,
    type INTEGER NOT NULL,
    step_index INTEGER NOT NULL,
    at INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    schema_version INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (run_id, seq)
) STRICT;

CREATE TRIGGER events_are_facts BEFORE UPDATE ON events
BEGIN
    SELECT raise(ABORT, 'events never change');
END;

CREATE TABLE checkpoints (
    run_id BLOB NOT NULL,
    seq INTEGER NOT NULL,
    parent_seq INTEGER,
    step_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    schema_version INTEGER NOT NULL,
    digest ANY NOT NULL,
    created_at INTEGER NOT NULL,
    agent_state BLOB NOT NULL,
    PRIMARY KEY (run_id, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE blobs (
    tenant_id TEXT NOT NULL,
    digest ANY NOT NULL,
    media_type TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    last_referenced_at INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (tenant_id, digest)
) STRICT;

-- Which runs use which content; `lasts`: also once the run's history is gone.
CREATE TABLE blob_uses (
    run_id BLOB NOT NULL,
    tenant_id TEXT NOT NULL,
    digest ANY NOT NULL,
    lasts INTEGER NOT NULL,
    PRIMARY KEY (run_id, digest)
) STRICT, WITHOUT ROWID;

CREATE INDEX blob_uses_by_content ON blob_uses (tenant_id, digest);

CREATE TABLE threads (
    thread_id BLOB NOT NULL PRIMARY KEY CHECK (length(thread_id) = 16),
    tenant_id TEXT NOT NULL,
    title TEXT NOT NULL,
    metadata BLOB NOT NULL,
    participants BLOB NOT NULL,
    capabilities BLOB NOT NULL,
    active_run_id BLOB,
    last_position INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    deleted_at INTEGER
) STRICT;

-- Who gets a run for each publication to a topic of a thread; the runs stand in the inbox.
CREATE TABLE subscriptions (
    thread_id BLOB NOT NULL,
    topic TEXT NOT NULL,
    agent_id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    inbox_thread_id BLOB NOT NULL CHECK (length(inbox_thread_id) = 16),
    created_at INTEGER NOT NULL,
    terms BLOB NOT NULL,
    caller BLOB NOT NULL,
    PRIMARY KEY (thread_id, topic, agent_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX subscriptions_by_inbox ON subscriptions (inbox_thread_id);

-- What declared fields that outlive their runs hold. A NULL value: nothing is written any more.
CREATE TABLE state_values (
    scope TEXT NOT NULL CHECK (scope = 'thread' OR scope = 'agent'),
    scope_id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    position INTEGER NOT NULL,
    run_id BLOB NOT NULL CHECK (length(run_id) = 16),
    seq INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    rule TEXT NOT NULL,
    value BLOB,
    PRIMARY KEY (scope, scope_id, tenant_id, name)
) STRICT, WITHOUT ROWID;

CREATE INDEX threads_deleted ON threads (thread_id) WHERE deleted_at IS NOT NULL;

-- What threads are found by: a digest for each pair of their metadata.
CREATE TABLE thread_tags (
    tenant_id TEXT NOT NULL,
    digest BLOB NOT NULL,
    thread_id BLOB NOT NULL,
    PRIMARY KEY (tenant_id, digest, thread_id)
) STRICT, WITHOUT ROWID;

-- What a thread says of others: behind `from_position` come its own messages, before them what
-- `base_thread_id` says up to `base_position`.
CREATE TABLE thread_bases (
    thread_id BLOB NOT NULL,
    from_position INTEGER NOT NULL,
    base_thread_id BLOB NOT NULL,
    base_position INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind = 'fork' OR kind = 'adopt'),
    author TEXT NOT NULL,
    run_id BLOB,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (thread_id, from_position)
) STRICT, WITHOUT ROWID;

CREATE INDEX thread_bases_by_base ON thread_bases (base_thread_id, thread_id);

CREATE TABLE messages (
    thread_id BLOB NOT NULL,
    position INTEGER NOT NULL,
    message_id BLOB NOT NULL UNIQUE CHECK (length(message_id) = 16),
    tenant_id TEXT NOT NULL,
    run_id BLOB,
    seq INTEGER,
    role TEXT NOT NULL,
    author TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    body BLOB,
    PRIMARY KEY (thread_id, position)
) STRICT;

CREATE TABLE interrupts (
    interrupt_id BLOB NOT NULL PRIMARY KEY CHECK (length(interrupt_id) = 16),
    run_id BLOB NOT NULL,
    tenant_id TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (
        kind = 'approval'
        OR kind = 'input'
        OR kind = 'auth'
        OR kind = 'outcome'
        OR kind = 'breakpoint'
    ),
    status TEXT NOT NULL CHECK (
        status = 'pending'
        OR status = 'answered'
        OR status = 'expired'
        OR status = 'cancelled'
    ),
    key TEXT,
    tool_call_id BLOB,
    args_digest ANY,
    definition_digest ANY,
    opened_seq INTEGER NOT NULL,
    closed_seq INTEGER,
    expires_at INTEGER,
    on_expiry TEXT NOT NULL,
    answer TEXT,
    answer_digest ANY,
    answered_by TEXT,
    answered_at INTEGER,
    consumed_by INTEGER,
    created_at INTEGER NOT NULL,
    CHECK ((status = 'pending') = (closed_seq IS NULL))
) STRICT;

CREATE INDEX interrupts_by_run ON interrupts (run_id, interrupt_id);
CREATE UNIQUE INDEX interrupts_by_key ON interrupts (run_id, key) WHERE key IS NOT NULL;
CREATE INDEX interrupts_pending ON interrupts (interrupt_id) WHERE status = 'pending';

CREATE TRIGGER interrupts_final BEFORE UPDATE OF status ON interrupts WHEN old.status <> 'pending'
BEGIN
    SELECT raise(ABORT, 'a closed interrupt is final');
END;

CREATE TABLE artifacts (
    artifact_id BLOB NOT NULL PRIMARY KEY CHECK (length(artifact_id) = 16),
    run_id BLOB NOT NULL,
    tenant_id TEXT NOT NULL,
    thread_id BLOB NOT NULL,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    media_type TEXT NOT NULL,
    digest ANY NOT NULL,
    size INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (
        status = 'draft'
        OR status = 'final'
        OR status = 'adopted'
        OR status = 'cancelled'
        OR status = 'discarded'
    ),
    step_index INTEGER NOT NULL,
    tool_call_id BLOB,
    seq INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE INDEX artifacts_by_run ON artifacts (run_id, artifact_id);
CREATE INDEX artifacts_by_thread ON artifacts (thread_id, artifact_id);

-- A digest of what is told: an execution may come late in several ways.
CREATE TABLE late_results (
    run_id BLOB NOT NULL,
    tool_call_id BLOB NOT NULL,
    execution INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    status TEXT NOT NULL,
    external_ref TEXT,
    recorded_at INTEGER NOT NULL,
    digest ANY NOT NULL,
    PRIMARY KEY (run_id, tool_call_id, execution, digest)
) STRICT, WITHOUT ROWID;

-- `ref` is the interrupt of an expiry or a notice, the child of a report, the call of a callback, else empty. Rows are inserted and deleted.
CREATE TABLE timers (
    run_id BLOB NOT NULL,
    kind TEXT NOT NULL CHECK (
        kind = 'deadline'
        OR kind = 'expiry'
        OR kind = 'close'
        OR kind = 'child'
        OR kind = 'callback'
        OR kind = 'notice'
    ),
    ref BLOB NOT NULL,
    due_at INTEGER NOT NULL,
    PRIMARY KEY (run_id, kind, ref)
) STRICT, WITHOUT ROWID;

CREATE INDEX timers_by_time ON timers (due_at);

CREATE TABLE agent_versions (
    agent_id TEXT NOT NULL,
    version TEXT NOT NULL,
    digest TEXT NOT NULL,
    registered_at INTEGER NOT NULL,
    card BLOB NOT NULL,
    PRIMARY KEY (agent_id, version)
) STRICT;

CREATE TABLE tools (
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    digest TEXT NOT NULL,
    registered_at INTEGER NOT NULL,
    spec BLOB NOT NULL,
    PRIMARY KEY (name, version)
) STRICT;
