-- What fields that outlive their runs hold.

-- name: insert_state_value
INSERT OR IGNORE INTO state_values (
    tenant_id, scope, scope_id, name, version, position, run_id, seq, updated_at, rule, value
) SELECT
    r.tenant_id, ?2, ?3, ?4, ?5, iif(?2 = 'thread', t.last_position, 0), r.run_id, ?6, ?7, ?8, ?9
FROM runs AS r INNER JOIN threads AS t ON t.thread_id = r.thread_id
WHERE r.run_id = ?1;

-- name: update_state_value
UPDATE state_values SET
    version = ?5, run_id = r.run_id, seq = ?6, updated_at = ?7, rule = ?8, value = ?9,
    position = iif(?2 = 'thread', t.last_position, 0)
FROM runs AS r INNER JOIN threads AS t ON t.thread_id = r.thread_id
WHERE
    r.run_id = ?1 AND state_values.scope = ?2 AND state_values.scope_id = ?3
    AND state_values.tenant_id = r.tenant_id AND state_values.name = ?4
    AND state_values.version = ?10;

-- name: put_state_value
INSERT INTO state_values (
    tenant_id, scope, scope_id, name, version, position, run_id, seq, updated_at, rule, value
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (scope, scope_id, tenant_id, name)
DO UPDATE SET
    version = excluded.version, position = excluded.position, run_id = excluded.run_id,
    seq = excluded.seq, updated_at = excluded.updated_at, rule = excluded.rule,
    value = excluded.value;

-- name: copy_state_values
INSERT INTO state_values (
    tenant_id, scope, scope_id, name, version, position, run_id, seq, updated_at, rule, value
) SELECT
    tenant_id, scope, ?1, name, version, position, run_id, seq, updated_at, rule, value
FROM state_values
WHERE scope = 'thread' AND scope_id = ?2 AND position <= ?3;

-- name: delete_state_values
DELETE FROM state_values WHERE scope = 'thread' AND scope_id = ?;

-- name: state_value_version
SELECT s.version FROM state_values AS s INNER JOIN runs AS r ON r.tenant_id = s.tenant_id
WHERE s.scope = ? AND s.scope_id = ? AND s.name = ? AND r.run_id = ?;

-- name: list_state_values
SELECT tenant_id, scope, scope_id, name, version, position, run_id, seq, updated_at, rule, value
FROM state_values
WHERE tenant_id = ?1 AND scope = ?2 AND scope_id = ?3 AND name > ?4
ORDER BY name
LIMIT ?5;
