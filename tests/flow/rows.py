"""The stored rows of a flow's database by SQL: to damage them as a disk would, and to count them."""

import json
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import anyio
import asyncpg

from perdure.protocol.ids import uuid_of
from perdure.protocol.log import TYPE_NAME
from perdure.store.postgres.wire import data_in, data_out


@dataclass(frozen=True, slots=True)
class Rows:
    """A database behind the back of its store. Statements take one id or digest as their `?`."""

    url: str

    def damage(self, statement: str, run_id: str, value: bytes | None = None) -> None:
        """Change rows of a run; `?` is the run, `!` the value. The file's own guards are off."""
        self._do(statement, run_id, value)

    def count_blobs(self, digest: str) -> int:
        """Return how many rows keep the content of a digest, over all tenants."""
        if not self._is_postgres:
            statement = "SELECT count(*) FROM blobs WHERE digest = ?"
            with closing(sqlite3.connect(self.url)) as connection:
                return connection.execute(statement, (bytes.fromhex(digest),)).fetchone()[0]
        statement = "SELECT count(*) FROM blobs WHERE digest = $1"

        async def count(connection: "asyncpg.Connection[Any]") -> int:
            return await connection.fetchval(statement, bytes.fromhex(digest))

        return self._on_postgres(count)

    def count(self, table: str) -> int:
        """Return how many rows a table has."""
        statement = f"SELECT count(*) FROM {table}"  # noqa: S608  # a name from a test
        if not self._is_postgres:
            with closing(sqlite3.connect(self.url)) as connection:
                return connection.execute(statement).fetchone()[0]

        async def count(connection: "asyncpg.Connection[Any]") -> int:
            return await connection.fetchval(statement)

        return self._on_postgres(count)

    def set_version(self, run_id: str, version: int) -> None:
        """Say of all events of a run that another schema version wrote them."""
        statement = f"UPDATE events SET schema_version = {version} WHERE run_id = ?"  # noqa: S608  # a number
        self._do(statement, run_id, None)

    def rewrite_as_version_0(self, run_id: str) -> None:
        """Write the log of a run as the prototypes did, with checkpoints of a digest of theirs."""
        for seq, kind, data in self._events(run_id):
            old = json.dumps(_version_0(TYPE_NAME[kind], json.loads(data))).encode()
            stored = data_out(old) if self._is_postgres else old
            statement = (
                f"UPDATE events SET data = !, schema_version = 0 WHERE run_id = ? AND seq = {seq}"  # noqa: S608  # a number
            )
            self._do(statement, run_id, stored)
        statement = "UPDATE checkpoints SET digest = !, schema_version = 0 WHERE run_id = ?"
        self._do(statement, run_id, bytes(32))

    def _events(self, run_id: str) -> list[tuple[int, int, bytes]]:
        run = uuid_of(run_id)
        if not self._is_postgres:
            with closing(sqlite3.connect(self.url)) as connection:
                return connection.execute(
                    "SELECT seq, type, data FROM events WHERE run_id = ?", (run.bytes,)
                ).fetchall()

        async def read(connection: "asyncpg.Connection[Any]") -> list[tuple[int, int, bytes]]:
            rows = await connection.fetch(
                "SELECT seq, type, data FROM events WHERE run_id = $1", run
            )
            return [(row["seq"], row["type"], data_in(row["data"])) for row in rows]

        return self._on_postgres(read)

    @property
    def _is_postgres(self) -> bool:
        return self.url.startswith("postgresql://")

    def _do(self, statement: str, run_id: str, value: bytes | None) -> None:
        run = uuid_of(run_id)
        if not self._is_postgres:
            given: list[Any] = [run.bytes] if value is None else [value, run.bytes]
            with closing(sqlite3.connect(self.url)) as connection, connection:
                connection.execute("DROP TRIGGER IF EXISTS events_are_facts")
                assert connection.execute(statement.replace("!", "?"), given).rowcount > 0
            return
        given = [run] if value is None else [value, run]
        text = statement.replace("!", "$1").replace("?", f"${len(given)}")

        async def change(connection: "asyncpg.Connection[Any]") -> None:
            await connection.execute("SET session_replication_role = replica")  # no triggers
            assert (await connection.execute(text, *given)).rpartition(" ")[2] != "0"

        self._on_postgres(change)

    def _on_postgres(self, work: "Callable[[asyncpg.Connection[Any]], Awaitable[Any]]") -> Any:
        async def run() -> Any:
            connection = await asyncpg.connect(self.url)
            try:
                return await work(connection)
            finally:
                await connection.close()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(anyio.run, run).result()


def _version_0(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what the prototypes would have written."""
    names = {
        "state": {"from_state": "from", "why": "transition"},
        "action": {"repeatable": "idempotent", "tool_call_id": "call"},
    }.get(kind, {})
    return {names.get(name, name): value for name, value in fields.items()}
