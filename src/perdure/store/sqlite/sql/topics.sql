-- Subscriptions to the topics of threads.

-- name: put_subscription
INSERT INTO subscriptions (
    thread_id, topic, agent_id, tenant_id, inbox_thread_id, created_at, terms, caller
) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (thread_id, topic, agent_id)
DO UPDATE SET terms = excluded.terms, caller = excluded.caller;

-- name: delete_subscription
DELETE FROM subscriptions
WHERE thread_id = ? AND topic = ? AND agent_id = ? AND tenant_id = ?;

-- name: list_subscriptions
SELECT thread_id, tenant_id, topic, agent_id, inbox_thread_id, created_at, terms, caller
FROM subscriptions
WHERE tenant_id = ?1 AND thread_id = ?2 AND (?3 IS NULL OR topic = ?3)
ORDER BY topic, agent_id;
