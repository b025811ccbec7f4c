-- What fields that outlive their runs hold.

-- name: insert_state_values
-- Waits for another writer of a row, and then finds it written.
INSERT INTO state_values (tenant_id, scope, scope_id, name, version, position, run_id, seq,
                          updated_at, rule, value)
SELECT r.tenant_id, u.scope, u.scope_id, u.name, u.version,
       CASE WHEN u.scope = 'thread' THEN t.last_position ELSE 0 END, r.run_id, u.seq,
       $2::timestamptz, u.rule, u.value
  FROM runs AS r JOIN threads AS t ON t.thread_id = r.thread_id
 CROSS JOIN unnest($3::text[], $4::text[], $5::text[], $6::int[], $7::int[], $8::text[],
                   $9::bytea[]) WITH ORDINALITY
                AS u(scope, scope_id, name, version, seq, rule, value, number)
 WHERE r.run_id = $1::uuid
 ORDER BY u.number
    ON CONFLICT (scope, scope_id, tenant_id, name) DO NOTHING
RETURNING 1 AS written;

-- name: update_state_values
-- The rows are locked in the order in which they are given, whatever the plan of the rest.
WITH moved AS MATERIALIZED (
    SELECT u.version, u.seq, u.rule, u.value, l.tenant_id, l.scope, l.scope_id, l.name
      FROM unnest($3::text[], $4::text[], $5::text[], $6::int[], $7::int[], $8::text[],
                  $9::bytea[], $10::int[])
               AS u(scope, scope_id, name, version, seq, rule, value, expected)
     CROSS JOIN LATERAL (
           SELECT s.tenant_id, s.scope, s.scope_id, s.name FROM state_values AS s
            WHERE s.tenant_id = (SELECT tenant_id FROM runs WHERE run_id = $1::uuid)
              AND s.scope = u.scope AND s.scope_id = u.scope_id AND s.name = u.name
              AND s.version = u.expected
              FOR NO KEY UPDATE) AS l)
UPDATE state_values AS s
   SET version = m.version, run_id = r.run_id, seq = m.seq, updated_at = $2::timestamptz,
       rule = m.rule, value = m.value,
       position = CASE WHEN m.scope = 'thread' THEN t.last_position ELSE 0 END
  FROM moved AS m, runs AS r JOIN threads AS t ON t.thread_id = r.thread_id
 WHERE r.run_id = $1::uuid AND s.tenant_id = m.tenant_id AND s.scope = m.scope
   AND s.scope_id = m.scope_id AND s.name = m.name
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

-- name: moved_state_values
-- Those of the fields whose row is at another version than expected (0: there is none).
SELECT u.name
  FROM unnest($2::text[], $3::text[], $4::text[], $5::int[]) AS u(scope, scope_id, name, expected)
 WHERE u.expected <> coalesce((
       SELECT s.version FROM state_values AS s
        WHERE s.tenant_id = (SELECT tenant_id FROM runs WHERE run_id = $1::uuid)
          AND s.scope = u.scope AND s.scope_id = u.scope_id AND s.name = u.name), 0);

-- name: list_state_values
SELECT tenant_id, scope, scope_id, name, version, position, run_id, seq, updated_at, rule, value
  FROM state_values
 WHERE tenant_id = $1 AND scope = $2 AND scope_id = $3 AND name COLLATE "C" > $4
 ORDER BY name COLLATE "C"
 LIMIT $5;
