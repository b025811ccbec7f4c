"""What the flow tests share: an engine over each database, checked by `verify` at the end."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import anyio

from perdure.engine.core import EngineSettings
from perdure.engine.ports import ApprovalNotice, HostedAgent
from perdure.ops.verify import verify
from perdure.protocol.events import StateEvent
from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunRow
from perdure.store.ports import Database
from perdure.store.postgres import PostgresDatabase
from perdure.store.sqlite import SqliteDatabase
from perdure.testing.embedded import SETTINGS, Embedded, embedded
from perdure.testing.tools import ToolZoo
from perdure.tools import LocalToolRunner

DataT = TypeVar("DataT")


def database_at(url: str, clock: Callable[[], datetime] | None = None) -> Database:
    """Return the database of a URL, not entered; with its own clock unless one is given."""
    if url.startswith("postgresql://"):
        return PostgresDatabase(url, clock=clock)
    # a killed process loses nothing by it
    return SqliteDatabase(Path(url), synchronous="off", clock=clock)


async def assert_sound(database: Database) -> None:
    """Fail when `perdure verify` finds anything."""
    found: list[str] = []
    await verify(database.reader, on_finding=lambda finding: found.append(str(finding)))
    assert not found, found


@asynccontextmanager
async def flow(
    url: str,
    agents: Sequence[HostedAgent],
    zoo: ToolZoo | None = None,
    *,
    settings: EngineSettings = SETTINGS,
    start: bool = True,
    tells: Callable[[ApprovalNotice], object] | None = None,
    runner: type[LocalToolRunner] = LocalToolRunner,
    clock: Callable[[], datetime] | None = None,
) -> AsyncGenerator[Embedded]:
    """Run an engine over the database of a URL; on leaving, verify must find nothing."""
    async with database_at(url, clock) as database:
        registry = zoo.registry if zoo is not None else None
        async with embedded(
            database,
            agents,
            tools=registry,
            settings=settings,
            start=start,
            tells=tells,
            runner=runner,
        ) as engine:
            try:
                yield engine
            finally:
                if zoo is not None:
                    zoo.open_gate()
        await assert_sound(database)


async def swept_until(
    engine: Embedded, run_id: str, holds: Callable[[RunRow], bool], *, wait_s: float = 30
) -> RunRow:
    """Sweep until a run's row is as asked: only the clock makes timers due and leases expire."""
    with anyio.fail_after(wait_s):
        while not holds(row := await engine.run(run_id)):
            await engine.sweep()
            await anyio.sleep(0.02)
    return row


def states(events: Sequence[RecordedEvent]) -> list[str]:
    """Return the states a run went through."""
    return [event.data.state for event in events if isinstance(event.data, StateEvent)]


def types(events: Sequence[RecordedEvent]) -> list[str]:
    """Return the types of the events, in order."""
    return [event.type for event in events]


def data_of(events: Sequence[RecordedEvent], kind: type[DataT]) -> list[DataT]:
    """Return the data of the events of one type, in order."""
    return [event.data for event in events if isinstance(event.data, kind)]
