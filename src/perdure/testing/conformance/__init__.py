"""What every store must do: contract classes that any adapter runs.

Subclass each class of `__all__` and give it a fixture `database` that yields an entered, empty
database made with the fixture `clock`:

    class OnMine:
        @pytest.fixture
        async def database(self, clock: FakeClock) -> AsyncIterator[Database]:
            async with MyDatabase(clock=clock) as database:
                yield database

    class TestInsert(OnMine, InsertContract): ...

The tests are async and need anyio's pytest plugin. A behaviour that is not tested here is not
promised.
"""

import pytest

_PARTS = (
    "base",
    "cancels",
    "claims",
    "fences",
    "inserts",
    "keys",
    "leases",
    "races",
    "readers",
    "refusals",
    "retention",
    "rows",
    "state_values",
    "texts",
    "threads",
    "timers",
    "topics",
    "trees",
    "writes",
)

pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

# the modules come after their registration, or their asserts would tell nothing
from perdure.testing.conformance.cancels import CancelContract, LateContract
from perdure.testing.conformance.claims import ClaimContract
from perdure.testing.conformance.fences import BatchContract, FenceContract
from perdure.testing.conformance.inserts import IdempotencyContract, InsertContract
from perdure.testing.conformance.keys import RequestKeyContract
from perdure.testing.conformance.leases import LeaseContract, QuarantineContract
from perdure.testing.conformance.races import RaceContract
from perdure.testing.conformance.readers import (
    BacklogContract,
    ReaderContract,
    RegistryContract,
)
from perdure.testing.conformance.refusals import RefusalContract
from perdure.testing.conformance.retention import RetentionContract
from perdure.testing.conformance.rows import RowContract
from perdure.testing.conformance.state_values import StateValueContract
from perdure.testing.conformance.texts import TextContract
from perdure.testing.conformance.thread_runs import ThreadContract
from perdure.testing.conformance.threads import BranchContract
from perdure.testing.conformance.timers import TimerContract
from perdure.testing.conformance.topics import SubscriptionContract
from perdure.testing.conformance.trees import (
    HandoffContract,
    TreeCancelContract,
    TreeContract,
)
from perdure.testing.conformance.writes import CommitContract

__all__ = [
    "BacklogContract",
    "BatchContract",
    "BranchContract",
    "CancelContract",
    "ClaimContract",
    "CommitContract",
    "FenceContract",
    "HandoffContract",
    "IdempotencyContract",
    "InsertContract",
    "LateContract",
    "LeaseContract",
    "QuarantineContract",
    "RaceContract",
    "ReaderContract",
    "RefusalContract",
    "RegistryContract",
    "RequestKeyContract",
    "RetentionContract",
    "RowContract",
    "StateValueContract",
    "SubscriptionContract",
    "TextContract",
    "ThreadContract",
    "TimerContract",
    "TreeCancelContract",
    "TreeContract",
]
