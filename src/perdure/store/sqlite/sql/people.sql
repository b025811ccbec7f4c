-- Threads and their messages, questions to people, artifacts.

-- name: insert_thread
INSERT INTO threads (
    thread_id, tenant_id, title, metadata, participants, capabilities, active_run_id,
    last_position, created_at, updated_at
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: find_thread
SELECT
    thread_id, tenant_id, title, metadata, participants, capabilities, active_run_id,
    last_position, created_at, updated_at, deleted_at
FROM threads
WHERE thread_id = ? AND tenant_id = ?;

-- name: list_threads
SELECT
    thread_id, tenant_id, title, metadata, participants, capabilities, active_run_id,
    last_position, created_at, updated_at, deleted_at
FROM threads
WHERE tenant_id = ? AND thread_id < ? AND deleted_at IS NULL
ORDER BY thread_id DESC
LIMIT ?;

-- name: activate_thread
-- From one active run to the next; to none only when no run waits for the thread.
WITH v (thread_id, was, becomes) AS (VALUES (?, ?, ?))
UPDATE threads SET active_run_id = v.becomes
FROM v
WHERE
    threads.thread_id = v.thread_id AND threads.active_run_id IS v.was
    AND (
        v.becomes IS NOT NULL
        OR NOT EXISTS (SELECT 1 FROM thread_queue AS q WHERE q.thread_id = v.thread_id)
    );

-- name: find_active_run
SELECT active_run_id FROM threads WHERE thread_id = ?;

-- name: next_position
UPDATE threads SET last_position = last_position + 1, updated_at = max(updated_at, ?)
WHERE thread_id = ? AND tenant_id = ?
RETURNING last_position;

-- name: find_message
SELECT
    message_id, thread_id, tenant_id, position, run_id, seq, role, author, body, created_at
FROM messages
WHERE message_id = ?1 AND (?2 IS NULL OR tenant_id = ?2);

-- name: insert_request_key
INSERT INTO request_keys (tenant_id, scope, key, fingerprint, object_id, created_at)
VALUES (?, ?, ?, ?, ?, ?);

-- name: find_request_key
SELECT object_id, fingerprint FROM request_keys
WHERE tenant_id = ? AND scope = ? AND key = ?;

-- name: insert_message
INSERT INTO messages (
    thread_id, position, message_id, tenant_id, run_id, seq, role, author, created_at, body
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: list_messages
SELECT
    message_id, thread_id, tenant_id, position, run_id, seq, role, author, body, created_at
FROM messages
WHERE thread_id = ? AND position > ? AND position <= ?
ORDER BY position
LIMIT ?;

-- name: insert_interrupt
INSERT INTO interrupts (
    interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
    definition_digest, opened_seq, expires_at, on_expiry, created_at
) VALUES (?, ?, ?, ?, 'pending', ?, ?, ?, ?, ?, ?, ?, ?);

-- name: close_interrupt
UPDATE interrupts SET
    status = ?, closed_seq = ?, answer = ?, answer_digest = ?, answered_by = ?, answered_at = ?,
    args_digest = coalesce(?, args_digest)
WHERE interrupt_id = ? AND run_id = ? AND status = 'pending';

-- name: spend_approval
UPDATE interrupts SET consumed_by = ?
WHERE interrupt_id = ? AND run_id = ? AND consumed_by IS NULL;

-- name: find_interrupt
SELECT
    interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
    definition_digest, opened_seq, closed_seq, expires_at, on_expiry, answer, answer_digest,
    answered_by, answered_at, consumed_by, created_at
FROM interrupts
WHERE interrupt_id = ?1 AND (?2 IS NULL OR tenant_id = ?2);

-- name: list_interrupts
SELECT
    interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
    definition_digest, opened_seq, closed_seq, expires_at, on_expiry, answer, answer_digest,
    answered_by, answered_at, consumed_by, created_at
FROM interrupts
WHERE tenant_id = ? AND interrupt_id > ? AND (?3 IS NULL OR status = ?3)
ORDER BY interrupt_id
LIMIT ?;

-- name: list_pending_interrupts
SELECT
    interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
    definition_digest, opened_seq, closed_seq, expires_at, on_expiry, answer, answer_digest,
    answered_by, answered_at, consumed_by, created_at
FROM interrupts
WHERE tenant_id = ? AND interrupt_id > ? AND status = 'pending'
ORDER BY interrupt_id
LIMIT ?;

-- name: list_run_interrupts
SELECT
    interrupt_id, run_id, tenant_id, kind, status, key, tool_call_id, args_digest,
    definition_digest, opened_seq, closed_seq, expires_at, on_expiry, answer, answer_digest,
    answered_by, answered_at, consumed_by, created_at
FROM interrupts
WHERE tenant_id = ?1 AND interrupt_id > ?2 AND run_id = ?3 AND (?4 IS NULL OR status = ?4)
ORDER BY interrupt_id
LIMIT ?5;

-- name: count_open_interrupts
SELECT count(*), min(created_at) FROM interrupts WHERE status = 'pending';

-- name: insert_artifact
INSERT INTO artifacts (
    artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
    step_index, tool_call_id, seq, created_at
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: discard_artifacts
UPDATE artifacts SET status = 'discarded' WHERE run_id = ? AND status <> 'adopted';

-- name: leave_blob
DELETE FROM blob_uses WHERE run_id = ? AND digest = ?;

-- name: find_artifact
SELECT
    artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
    step_index, tool_call_id, seq, created_at
FROM artifacts
WHERE artifact_id = ? AND tenant_id = ?;

-- name: list_artifacts
SELECT
    artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
    step_index, tool_call_id, seq, created_at
FROM artifacts
WHERE tenant_id = ? AND artifact_id > ?
ORDER BY artifact_id
LIMIT ?;

-- name: list_run_artifacts
SELECT
    artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
    step_index, tool_call_id, seq, created_at
FROM artifacts
WHERE tenant_id = ?1 AND artifact_id > ?2 AND run_id = ?3 AND (?4 IS NULL OR thread_id = ?4)
ORDER BY artifact_id
LIMIT ?5;

-- name: list_thread_artifacts
SELECT
    artifact_id, run_id, tenant_id, thread_id, name, version, media_type, digest, size, status,
    step_index, tool_call_id, seq, created_at
FROM artifacts
WHERE tenant_id = ? AND artifact_id > ? AND thread_id = ?
ORDER BY artifact_id
LIMIT ?;
