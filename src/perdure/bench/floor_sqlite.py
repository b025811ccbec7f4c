"""The floor on SQLite: the fewest durable writes that W1 needs, grouped in one writer thread.

A run is one insert; each event is one fenced update and one insert; whatever is pending goes
into one transaction (WAL, synchronous FULL). Nothing else of a runtime is here.
"""

import asyncio
import json
import queue
import sqlite3
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import JsonValue

from perdure.bench.payloads import STEPS, args_of, result_of

BATCH_MAX = 500
SCHEMA = """
create table run(id integer primary key, name text, status text not null, version int not null);
create table event(run_id int, seq int, kind text, body text, at real default (unixepoch()),
                   primary key(run_id, seq));
"""
INSERT_RUN = "insert into run(name, status, version) values(?, 'running', 0) returning id"
ADVANCE = "update run set version = version + 1, status = ? where id = ? and version = ?"
INSERT_EVENT = "insert into event(run_id, seq, kind, body) values(?, ?, ?, ?)"

_Job = tuple[tuple[object, ...], "asyncio.Future[int]"]


class FloorSqlite:
    """Minimal grouped writes into a file of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, daemon=True)

    async def __aenter__(self) -> Self:
        with sqlite3.connect(self._path) as connection:
            connection.execute("pragma journal_mode=wal")
            connection.executescript(SCHEMA)
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._jobs.put(None)
        self._thread.join(10)

    async def one_run(self, seed: int) -> None:
        """Write one run of W1."""
        run_id = await self._do(f"run-{seed}")
        version = 0
        for step in range(STEPS):
            args = args_of(seed, step)
            await self._event(run_id, version, "model", {"tool": "lookup", "args": args})
            page = args["page"]
            assert isinstance(page, int)
            await self._event(run_id, version + 1, "tool", {"result": result_of(page)})
            version += 2
        await self._event(run_id, version, "final", {"text": "done"}, status="done")

    async def _event(
        self, run_id: int, version: int, kind: str, body: JsonValue, *, status: str = "running"
    ) -> None:
        await self._do(run_id, version, kind, json.dumps(body), status)

    async def _do(self, *job: object) -> int:
        future: asyncio.Future[int] = self._loop.create_future()
        self._jobs.put((job, future))
        return await future

    def _write(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None)
        connection.execute("pragma synchronous=full")
        while (first := self._jobs.get()) is not None:
            batch: list[_Job] = [first]
            stop = False
            while len(batch) < BATCH_MAX and not self._jobs.empty():
                more = self._jobs.get()
                if more is None:
                    stop = True
                    break
                batch.append(more)
            connection.execute("begin immediate")
            done = [(future, self._apply(connection, job)) for job, future in batch]
            connection.execute("commit")
            self._loop.call_soon_threadsafe(_resolve, done)
            if stop:
                break
        connection.close()

    def _apply(self, connection: sqlite3.Connection, job: tuple[object, ...]) -> int:
        if len(job) == 1:
            return int(connection.execute(INSERT_RUN, job).fetchone()[0])
        run_id, version, kind, body, status = job
        assert isinstance(version, int)
        changed = connection.execute(ADVANCE, (status, run_id, version)).rowcount
        assert changed == 1
        connection.execute(INSERT_EVENT, (run_id, version + 1, kind, body))
        return version + 1


def _resolve(done: "list[tuple[asyncio.Future[int], int]]") -> None:
    for future, value in done:
        future.set_result(value)
