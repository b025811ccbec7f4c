-- What workers serve.

-- name: upsert_agent
INSERT INTO agent_versions (agent_id, version, digest, registered_at, card) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (agent_id, version) DO UPDATE SET
    digest = excluded.digest, card = excluded.card
WHERE agent_versions.digest <> excluded.digest;

-- name: list_agents
SELECT agent_id, version, card, registered_at FROM agent_versions
ORDER BY agent_id, registered_at, version;

-- name: upsert_tool
INSERT INTO tools (name, version, digest, registered_at, spec) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (name, version) DO UPDATE SET
    digest = excluded.digest, spec = excluded.spec
WHERE tools.digest <> excluded.digest;

-- name: list_tools
SELECT name, version, spec, registered_at FROM tools ORDER BY name, registered_at, version;
