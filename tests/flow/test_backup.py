"""A copy taken in the middle of work, restored elsewhere, holds all promises and goes on (C8)."""

import sqlite3
import subprocess
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import anyio.to_thread
import pytest

from perdure.ops.local_postgres import LocalPostgres, find_programs
from perdure.protocol.decisions import Ask, Finish
from perdure.protocol.states import TERMINAL, Answer, RunState
from perdure.store.ports import Database
from perdure.store.postgres import PostgresDatabase
from perdure.store.reader import RunFilter
from perdure.store.sqlite import SqliteDatabase
from perdure.testing.embedded import SystemClock, call, embedded, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import assert_sound, database_at

AGENTS = [
    scripted("asks", [Ask(title="?"), Finish(answer="asked")]),
    scripted("hangs", [call("hang"), Finish(answer="hung")], tools=["hang"]),
    scripted(
        "works", [*(call("echo", value=n) for n in range(6)), Finish(answer="done")], tools=["echo"]
    ),
]


def _later() -> datetime:
    """Return the time at which the leases of the copied database have run out."""
    return SystemClock().now() + timedelta(seconds=60)


def _copy_sqlite(source: str, target: Path) -> None:
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("VACUUM INTO ?", (str(target),))


def _copy_postgres(source: str, target: str, file: Path) -> None:
    """Do what docs/operations.md says."""
    programs = find_programs()
    subprocess.run(
        [programs / "pg_dump", "--format=custom", f"--file={file}", source], check=True, timeout=60
    )
    subprocess.run(
        [programs / "pg_restore", "--no-owner", f"--dbname={target}", file], check=True, timeout=60
    )


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_copy_taken_in_the_middle_of_work_is_sound_and_goes_on(
    url: str, zoo: ToolZoo, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """R-1.6: what is committed together is copied together; open calls are cleared up."""
    async with (
        database_at(url) as database,
        embedded(database, AGENTS, tools=zoo.registry) as engine,
    ):
        asks, hangs = await engine.submit("asks"), await engine.submit("hangs")
        await engine.wait_waiting(asks)
        await zoo.wait_started("hang")
        works = [await engine.submit("works") for _ in range(8)]
        await engine.wait_event(works[0], "result")
        restored: Database
        if url.startswith("postgresql://"):
            server: LocalPostgres = request.getfixturevalue("postgres")
            dsn = server.create_database("restored")
            request.addfinalizer(lambda: server.drop_database("restored"))
            await anyio.to_thread.run_sync(_copy_postgres, url, dsn, tmp_path / "backup.dump")
            restored = PostgresDatabase(dsn, clock=_later)
        else:
            await anyio.to_thread.run_sync(_copy_sqlite, url, tmp_path / "restored.db")
            restored = SqliteDatabase(tmp_path / "restored.db", clock=_later, synchronous="off")
        zoo.open_gate()
    async with restored:
        await assert_sound(restored)
        rows = await restored.reader.list_runs(None, RunFilter(), after=None, limit=100)
        copied = {row.facts.run_id: row for row in rows}
        assert {asks, hangs, *works} == set(copied)
        assert copied[hangs].hot.state not in TERMINAL
        async with embedded(restored, AGENTS, tools=zoo.registry) as engine:
            (question,) = await engine.pending(asks)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
            for run_id in copied:
                row = await engine.wait_terminal(run_id)
                assert row.hot.state is RunState.SUCCEEDED
        await assert_sound(restored)
