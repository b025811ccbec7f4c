"""The SQLite adapter keeps every contract of a store."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.store.ports import Database
from perdure.store.sqlite import SqliteDatabase
from perdure.testing import conformance
from perdure.testing.clock import FakeClock


class OnSqlite:
    """Gives a contract its database: a new file, thrown away after the test."""

    @pytest.fixture
    async def database(self, clock: FakeClock, sqlite_path: Path) -> AsyncIterator[Database]:
        async with SqliteDatabase(sqlite_path, clock=clock, synchronous="off") as database:
            yield database


class TestBacklog(OnSqlite, conformance.BacklogContract): ...


class TestBatch(OnSqlite, conformance.BatchContract): ...


class TestCancel(OnSqlite, conformance.CancelContract): ...


class TestClaim(OnSqlite, conformance.ClaimContract): ...


class TestCommit(OnSqlite, conformance.CommitContract): ...


class TestFence(OnSqlite, conformance.FenceContract): ...


class TestIdempotency(OnSqlite, conformance.IdempotencyContract): ...


class TestInsert(OnSqlite, conformance.InsertContract): ...


class TestLate(OnSqlite, conformance.LateContract): ...


class TestLease(OnSqlite, conformance.LeaseContract): ...


class TestQuarantine(OnSqlite, conformance.QuarantineContract): ...


class TestRace(OnSqlite, conformance.RaceContract): ...


class TestReader(OnSqlite, conformance.ReaderContract): ...


class TestRefusal(OnSqlite, conformance.RefusalContract): ...


class TestRegistry(OnSqlite, conformance.RegistryContract): ...


class TestRequestKey(OnSqlite, conformance.RequestKeyContract): ...


class TestRow(OnSqlite, conformance.RowContract): ...


class TestText(OnSqlite, conformance.TextContract): ...


class TestThread(OnSqlite, conformance.ThreadContract): ...


class TestRetention(OnSqlite, conformance.RetentionContract): ...


class TestBranch(OnSqlite, conformance.BranchContract): ...


class TestTimer(OnSqlite, conformance.TimerContract): ...


class TestTree(OnSqlite, conformance.TreeContract): ...


class TestStateValue(OnSqlite, conformance.StateValueContract): ...


class TestSubscription(OnSqlite, conformance.SubscriptionContract): ...


class TestTreeCancel(OnSqlite, conformance.TreeCancelContract): ...


class TestHandoff(OnSqlite, conformance.HandoffContract): ...


def test_every_contract_is_run() -> None:
    """R-12.5."""
    mine = {
        base.__name__
        for case in OnSqlite.__subclasses__()
        for base in case.__bases__
        if base is not OnSqlite
    }
    assert mine == set(conformance.__all__)
