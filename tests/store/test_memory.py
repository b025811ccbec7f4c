"""The memory store keeps the contract of stores."""

from collections.abc import AsyncIterator

import pytest

from perdure.protocol.base import to_micros
from perdure.protocol.errors import Unavailable
from perdure.store.memory import MemoryDatabase
from perdure.store.ports import Database
from perdure.testing import conformance
from perdure.testing.builders import new_run
from perdure.testing.clock import FakeClock


class OnMemory:
    """Gives a contract its database."""

    @pytest.fixture
    async def database(self, clock: FakeClock) -> AsyncIterator[Database]:
        async with MemoryDatabase(clock=clock) as database:
            yield database


class TestInsert(OnMemory, conformance.InsertContract): ...


class TestIdempotency(OnMemory, conformance.IdempotencyContract): ...


class TestThread(OnMemory, conformance.ThreadContract): ...


class TestRetention(OnMemory, conformance.RetentionContract): ...


class TestBranch(OnMemory, conformance.BranchContract): ...


class TestClaim(OnMemory, conformance.ClaimContract): ...


class TestLease(OnMemory, conformance.LeaseContract): ...


class TestQuarantine(OnMemory, conformance.QuarantineContract): ...


class TestFence(OnMemory, conformance.FenceContract): ...


class TestBatch(OnMemory, conformance.BatchContract): ...


class TestCancel(OnMemory, conformance.CancelContract): ...


class TestLate(OnMemory, conformance.LateContract): ...


class TestCommit(OnMemory, conformance.CommitContract): ...


class TestRequestKey(OnMemory, conformance.RequestKeyContract): ...


class TestRow(OnMemory, conformance.RowContract): ...


class TestRefusal(OnMemory, conformance.RefusalContract): ...


class TestTimer(OnMemory, conformance.TimerContract): ...


class TestRace(OnMemory, conformance.RaceContract): ...


class TestReader(OnMemory, conformance.ReaderContract): ...


class TestBacklog(OnMemory, conformance.BacklogContract): ...


class TestRegistry(OnMemory, conformance.RegistryContract): ...


class TestText(OnMemory, conformance.TextContract): ...


class TestTree(OnMemory, conformance.TreeContract): ...


class TestStateValue(OnMemory, conformance.StateValueContract): ...


class TestSubscription(OnMemory, conformance.SubscriptionContract): ...


class TestTreeCancel(OnMemory, conformance.TreeCancelContract): ...


class TestHandoff(OnMemory, conformance.HandoffContract): ...


def test_every_contract_is_run() -> None:
    """R-12.5."""
    mine = {
        base.__name__
        for case in OnMemory.__subclasses__()
        for base in case.__bases__
        if base is not OnMemory
    }
    assert mine == set(conformance.__all__)


async def test_without_a_clock_it_takes_the_systems() -> None:
    async with MemoryDatabase() as database:
        row = (await database.store.insert_run(new_run())).row
        again = (await database.store.insert_run(new_run())).row
    assert 0 < to_micros(row.hot.updated_at) <= to_micros(again.hot.updated_at)


async def test_a_database_that_was_left_is_unavailable() -> None:
    async with MemoryDatabase() as database:
        await database.reader.ping()
    with pytest.raises(Unavailable):
        await database.reader.ping()
