"""Looking at a database's schema without changing it."""

import anyio

from perdure.store.migrate import Applied
from perdure.store.postgres.driver import CLOSE_S, Connection
from perdure.store.postgres.lanes import Lane
from perdure.store.postgres.migrator import MIGRATIONS
from perdure.store.status import SchemaState, schema_state

_HAS_TABLE = "SELECT to_regclass('schema_migrations') IS NOT NULL AS there"
_LIST = "SELECT version, name, checksum FROM schema_migrations ORDER BY version"


async def read_schema_state(dsn: str) -> SchemaState:
    """Return a database's state; an empty one has version 0. Raises Unavailable, SchemaRefused."""
    lane = Lane(dsn)
    try:
        return schema_state(MIGRATIONS, await lane.run(_applied))
    finally:
        with anyio.move_on_after(CLOSE_S, shield=True):
            await lane.close()


async def _applied(connection: Connection) -> list[Applied]:
    (table,) = await connection.fetch(_HAS_TABLE)
    if not table["there"]:
        return []
    return [
        Applied(version=row["version"], name=row["name"], checksum=row["checksum"])
        for row in await connection.fetch(_LIST)
    ]
