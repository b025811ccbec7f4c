-- Subscriptions to the topics of threads.

-- name: put_subscription
INSERT INTO subscriptions (thread_id, topic, agent_id, tenant_id, inbox_thread_id, created_at,
                           terms, caller)
VALUES ($1::uuid, $2, $3, $4, $5::uuid, $6, $7, $8)
    ON CONFLICT (thread_id, topic, agent_id)
    DO UPDATE SET terms = excluded.terms, caller = excluded.caller
RETURNING thread_id, tenant_id, topic, agent_id, inbox_thread_id, created_at, terms, caller;

-- name: delete_subscription
DELETE FROM subscriptions
 WHERE thread_id = $1::uuid AND topic = $2 AND agent_id = $3 AND tenant_id = $4
RETURNING 1 AS gone;

-- name: list_subscriptions
SELECT thread_id, tenant_id, topic, agent_id, inbox_thread_id, created_at, terms, caller
  FROM subscriptions
 WHERE tenant_id = $1 AND thread_id = $2::uuid AND ($3::text IS NULL OR topic = $3)
 ORDER BY topic COLLATE "C", agent_id COLLATE "C";
