-- Idempotency keys of requests that make a thread or a message. A run's key stands in its own row.

CREATE TABLE request_keys (
    tenant_id TEXT NOT NULL,
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint ANY NOT NULL,
    object_id BLOB NOT NULL CHECK (length(object_id) = 16),
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, scope, key)
) STRICT, WITHOUT ROWID;
