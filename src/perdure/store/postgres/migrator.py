"""Brings a database to this code's schema: numbered files, one transaction, under an advisory lock.

Several processes may start at once: one migrates, the others wait, bounded, and say so in the log.
A database that is newer than this code is refused with both versions named.
"""

import logging
import time
from importlib.resources import files

import anyio

from perdure.protocol.errors import Unavailable
from perdure.store.migrate import (
    Applied,
    Migration,
    SchemaRefused,
    plan_migrations,
    read_migrations,
)
from perdure.store.postgres.driver import Connection
from perdure.store.postgres.lanes import Lane

log = logging.getLogger(__name__)

WAIT_S = 300.0
_POLL_S = 0.2
_LOG_EVERY_S = 10.0
LOCK = 0x70657264757265  # "perdure"; an advisory lock is per database

MIGRATIONS = read_migrations(files("perdure.store.postgres") / "migrations")
SCHEMA_VERSION_OF_CODE = max(migration.version for migration in MIGRATIONS)

_TABLE = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    version integer PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)
"""
_APPLIED = "SELECT version, name, checksum FROM schema_migrations ORDER BY version"
_HAS_TABLE = "SELECT to_regclass('schema_migrations') IS NOT NULL AS there"


async def migrate(lane: Lane, *, wait_s: float = WAIT_S) -> None:
    """Apply what is pending; raise SchemaRefused or Unavailable (`unavailable`)."""
    pending = await lane.run(_pending)
    if not pending:
        return
    started, logged = time.monotonic(), 0.0
    while not await lane.run(_apply):
        waited_s = time.monotonic() - started
        if waited_s > wait_s:
            raise Unavailable(f"another process has been migrating for {waited_s:.0f} s")
        if waited_s >= logged:
            log.warning("waiting for another process that migrates the database")
            logged = waited_s + _LOG_EVERY_S
        await anyio.sleep(_POLL_S)


async def _pending(connection: Connection) -> list[Migration]:
    return plan_migrations(MIGRATIONS, await _applied(connection))


async def _applied(connection: Connection) -> list[Applied]:
    (table,) = await connection.fetch(_HAS_TABLE)
    if not table["there"]:
        return []
    return [
        Applied(version=row["version"], name=row["name"], checksum=row["checksum"])
        for row in await connection.fetch(_APPLIED)
    ]


async def _apply(connection: Connection) -> bool:
    """Migrate, unless another process does so at the moment (then False)."""
    async with connection.transaction():
        (mine,) = await connection.fetch("SELECT pg_try_advisory_xact_lock($1) AS locked", LOCK)
        if not mine["locked"]:
            return False
        await connection.execute(_TABLE)
        for migration in await _pending(connection):
            log.info("applying migration %s (%s)", migration.version, migration.name)
            await connection.execute(migration.sql)
            await connection.execute(
                "INSERT INTO schema_migrations (version, name, checksum) VALUES ($1, $2, $3)",
                migration.version,
                migration.name,
                migration.checksum,
            )
    return True


async def check_version(version: int | None) -> None:
    """Raise SchemaRefused when the database no longer has the schema this code works on."""
    if version is None or version < SCHEMA_VERSION_OF_CODE:
        raise SchemaRefused(
            f"the database has schema version {version or 0}, this code needs "
            f"{SCHEMA_VERSION_OF_CODE}",
            details={"database": version or 0, "code": SCHEMA_VERSION_OF_CODE},
        )
