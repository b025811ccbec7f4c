"""What every contract class shares: its fixtures, and the checks that hold after anything."""

import anyio
import pytest

from perdure.protocol.log import RecordedEvent
from perdure.store.commits import Busy, Commit, CommitResult
from perdure.store.ports import Database, Store
from perdure.store.reader import Reader
from perdure.testing.clock import FakeClock

EVENTS_MAX = 10_000
ANSWER_S_MAX = 15


class Contract:
    """Subclass it with a fixture `database`: an entered, empty database that runs by `clock`."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        """The clock of the database."""
        return FakeClock()

    @pytest.fixture
    def store(self, database: Database) -> Store:
        """The writing port."""
        return database.store

    @pytest.fixture
    def reader(self, database: Database) -> Reader:
        """The reading port."""
        return database.reader


async def history(reader: Reader, run_id: str) -> list[RecordedEvent]:
    """Return a run's whole log; its seqs must be gapless, its times must not run backwards."""
    events = await reader.events_after(run_id, 0, limit=EVENTS_MAX)
    row = await reader.find_run(None, run_id)
    assert row is not None
    assert [event.seq for event in events] == list(range(1, row.hot.last_seq + 1))
    times = [event.at for event in events]
    assert times == sorted(times)
    assert row.hot.updated_at >= times[-1]
    return events


async def types_of(reader: Reader, run_id: str) -> list[str]:
    """Return the types of a run's events, in order."""
    return [event.type for event in await history(reader, run_id)]


async def settled_answer(store: Store, commit: Commit) -> CommitResult:
    """Send a commit until it finds its row free, as a committer does (decision 6)."""
    with anyio.fail_after(ANSWER_S_MAX):
        while True:
            (result,) = await store.commit([commit])
            if not isinstance(result, Busy):
                return result
    raise AssertionError("the scope raises when time is up")
