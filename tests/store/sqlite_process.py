"""A process of its own on a SQLite file, started by the tests: `sqlite_process.py MODE FILE N`.

`claim`: take runs one by one until N are taken by all; print the ids as JSON.
`work`: carry runs from claim to success until N have succeeded; print how many it carried.
`die`: commit to N held runs at once and exit inside the transaction, before COMMIT.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from perdure.protocol.states import RunState
from perdure.store.reader import RunFilter
from perdure.store.sqlite import SqliteDatabase
from perdure.testing.builders import commit_of, note, want, write


async def _claim(database: SqliteDatabase, count: int) -> object:
    mine: list[str] = []
    where = RunFilter(state=RunState.PENDING)
    while True:
        found = await database.store.claim_runs(want(worker_id=f"worker-{os.getpid()}", limit=1))
        mine += [claimed.row.facts.run_id for claimed in found]
        if not found:
            rows = await database.reader.list_runs(None, where, after=None, limit=count + 1)
            if len(rows) == count and all(row.hot.attempt > 0 for row in rows):
                return mine


async def _work(database: SqliteDatabase, count: int) -> object:
    mine = 0
    where = RunFilter(state=RunState.SUCCEEDED)
    while True:
        found = await database.store.claim_runs(want(worker_id=f"worker-{os.getpid()}", limit=2))
        for claimed in found:
            path = (RunState.PLANNING, RunState.EXECUTING, RunState.SUCCEEDED)
            await write(database.store, commit_of(claimed.row, path=path))
            mine += 1
        if not found:
            done = await database.reader.list_runs(None, where, after=None, limit=count + 1)
            if len(done) == count:
                return mine
            await asyncio.sleep(0.01)


async def _die(database: SqliteDatabase, count: int) -> object:
    found = await database.store.claim_runs(want(limit=count))
    database.writer.before_commit = lambda _: os._exit(9)
    await database.store.commit([commit_of(claimed.row, note()) for claimed in found])
    return "it lived"


async def main(mode: str, path: Path, count: int) -> None:
    """Do what the mode says and print the answer."""
    act = {"claim": _claim, "work": _work, "die": _die}[mode]
    async with SqliteDatabase(path) as database:
        sys.stdout.write(json.dumps(await act(database, count)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
