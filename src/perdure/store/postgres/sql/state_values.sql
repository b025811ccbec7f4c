-- What fields that outlive their runs hold.

-- name: insert_state_value
-- Waits for another writer of the row, and then finds it written.
INSERT INTO state_values (tenant_id, scope, scope_id, name, version, position, run_id, seq,
                          updated_at, rule, value)
SELECT r.tenant_id, $2::text, $3::text, $4::text, $5::int,
       CASE WHEN $2::text = 'thread' THEN t.last_position ELSE 0 END, r.run_id, $6::int,
       $7::timestamptz, $8::text, $9::bytea
  FROM runs AS r JOIN threads AS t ON t.thread_id = r.thread_id
 WHERE r.run_id = $1::uuid
    ON CONFLICT (scope, scope_id, tenant_id, name) DO NOTHING
RETURNING 1 AS written;

-- name: update_state_value
UPDATE state_values AS s
   SET version = $5, run_id = r.run_id, seq = $6, updated_at = $7, rule = $8, value = $9,
       position = CASE WHEN $2::text = 'thread' THEN t.last_position ELSE 0 END
  FROM runs AS r JOIN threads AS t ON t.thread_id = r.thread_id
 WHERE r.run_id = $1::uuid AND s.tenant_id = r.tenant_id AND s.scope = $2 AND s.scope_id = $3
   AND s.name = $4 AND s.version = $10
RETURNING 1 AS written;

-- name: put_state_value
INSERT INTO state_values (tenant_id, scope, scope_id, name, version, position, run_id, seq,
                          updated_at, rule, value)
VALUES ($1, $2, $3, $4, $5, $6, $7::uuid, $8, $9, $10, $11)
    ON CONFLICT (scope, scope_id, tenant_id, name)
    DO UPDATE SET version = excluded.version, position = excluded.position,
                  run_id = excluded.run_id, seq = excluded.seq, updated_at = excluded.updated_at,
                  rule = excluded.rule, value = excluded.value;

-- name: copy_state_values
INSERT INTO state_values (tenant_id, scope, scope_id, name, version, position, run_id, seq,
                          updated_at, rule, value)
SELECT tenant_id, scope, $1, name, version, position, run_id, seq, updated_at, rule, value
  FROM state_values
 WHERE scope = 'thread' AND scope_id = $2 AND position <= $3;

-- name: delete_state_values
DELETE FROM state_values WHERE scope = 'thread' AND scope_id = $1;

-- name: state_value_version
SELECT s.version FROM state_values AS s JOIN runs AS r ON r.tenant_id = s.tenant_id
 WHERE s.scope = $1 AND s.scope_id = $2 AND s.name = $3 AND r.run_id = $4::uuid;

-- name: list_state_values
SELECT tenant_id, scope, scope_id, name, version, position, run_id, seq, updated_at, rule, value
  FROM state_values
 WHERE tenant_id = $1 AND scope = $2 AND scope_id = $3 AND name COLLATE "C" > $4
 ORDER BY name COLLATE "C"
 LIMIT $5;
