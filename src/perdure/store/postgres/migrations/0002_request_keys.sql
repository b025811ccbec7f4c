-- Idempotency keys of requests that make a thread or a message. A run's key stands in its own row.

CREATE TABLE request_keys (
    object_id uuid NOT NULL,
    created_at timestamptz NOT NULL,
    tenant_id text NOT NULL,
    scope text NOT NULL,
    key bytea NOT NULL,
    fingerprint bytea NOT NULL,
    PRIMARY KEY (tenant_id, scope, key)
);
