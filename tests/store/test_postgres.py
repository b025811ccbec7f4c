"""The PostgreSQL store keeps the contract of stores, on a throwaway server."""

from collections.abc import AsyncIterator

import pytest

from perdure.store.ports import Database
from perdure.store.postgres import PostgresDatabase
from perdure.testing import conformance
from perdure.testing.clock import FakeClock

pytestmark = pytest.mark.timeout(60)


class OnPostgres:
    """Gives a contract its database."""

    @pytest.fixture
    async def database(self, clock: FakeClock, postgres_dsn: str) -> AsyncIterator[Database]:
        async with PostgresDatabase(postgres_dsn, clock=clock) as database:
            yield database


class TestInsert(OnPostgres, conformance.InsertContract): ...


class TestIdempotency(OnPostgres, conformance.IdempotencyContract): ...


class TestThread(OnPostgres, conformance.ThreadContract): ...


class TestRetention(OnPostgres, conformance.RetentionContract): ...


class TestBranch(OnPostgres, conformance.BranchContract): ...


class TestClaim(OnPostgres, conformance.ClaimContract): ...


class TestLease(OnPostgres, conformance.LeaseContract): ...


class TestQuarantine(OnPostgres, conformance.QuarantineContract): ...


class TestFence(OnPostgres, conformance.FenceContract): ...


class TestBatch(OnPostgres, conformance.BatchContract): ...


class TestCancel(OnPostgres, conformance.CancelContract): ...


class TestLate(OnPostgres, conformance.LateContract): ...


class TestCommit(OnPostgres, conformance.CommitContract): ...


class TestRequestKey(OnPostgres, conformance.RequestKeyContract): ...


class TestRow(OnPostgres, conformance.RowContract): ...


class TestRefusal(OnPostgres, conformance.RefusalContract): ...


class TestTimer(OnPostgres, conformance.TimerContract): ...


class TestRace(OnPostgres, conformance.RaceContract): ...


class TestReader(OnPostgres, conformance.ReaderContract): ...


class TestBacklog(OnPostgres, conformance.BacklogContract): ...


class TestRegistry(OnPostgres, conformance.RegistryContract): ...


class TestText(OnPostgres, conformance.TextContract): ...


class TestTree(OnPostgres, conformance.TreeContract): ...


class TestStateValue(OnPostgres, conformance.StateValueContract): ...


class TestSubscription(OnPostgres, conformance.SubscriptionContract): ...


class TestTreeCancel(OnPostgres, conformance.TreeCancelContract): ...


class TestHandoff(OnPostgres, conformance.HandoffContract): ...


def test_every_contract_is_run() -> None:
    """R-12.5."""
    mine = {
        base.__name__
        for case in OnPostgres.__subclasses__()
        for base in case.__bases__
        if base is not OnPostgres
    }
    assert mine == set(conformance.__all__)
