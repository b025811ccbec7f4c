"""Faults of the engine that the acceptance scene found, each at the least distance that shows it."""

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import pytest

from perdure.engine.committer import Committer
from perdure.engine.context import PlannerContext
from perdure.engine.core import Core, EngineSettings
from perdure.engine.heartbeat import Holder, LoopHeartbeat
from perdure.engine.load import load_view
from perdure.engine.ports import HostedAgent
from perdure.engine.worker import Worker
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.errors import Unavailable
from perdure.protocol.events import ResultEvent
from perdure.protocol.records import CheckpointRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import Answer, AttemptEnd, RunState, ToolCallStatus
from perdure.store.commits import Commit, CommitResult, Committed
from perdure.store.ports import Database, Store
from perdure.store.reader import Reader
from perdure.store.requests import Claimed, ClaimWant, LeaseKey
from perdure.store.sqlite import SqliteDatabase
from perdure.testing.builders import commit_of
from perdure.testing.embedded import (
    SETTINGS,
    Embedded,
    SystemClock,
    call,
    calls,
    embedded,
    new_worker,
    scripted,
    unasked,
)
from perdure.testing.faults import Boundary, FaultyStore, Plan, Trap, When
from perdure.testing.tools import ToolZoo
from perdure.tools import Returned, succeeded, tool
from tests.flow.world import assert_sound


class SlowAtFirst(FaultyStore):
    """A store with a trap, whose first claim that takes something takes its time."""

    def __init__(self, inner: Store, trap: Trap, claim_s: float) -> None:
        super().__init__(inner, trap)
        self._claim_s = claim_s

    async def claim_runs(self, want: ClaimWant) -> list[Claimed]:
        """Claim, and answer late once."""
        claimed = await super().claim_runs(want)
        if claimed:
            wait_s, self._claim_s = self._claim_s, 0.0
            await anyio.sleep(wait_s)
        return claimed


class Faulty:
    """A database whose store has a trap."""

    def __init__(self, inner: Database, trap: Trap, claim_s: float) -> None:
        self._inner = inner
        self.store: Store = SlowAtFirst(inner.store, trap, claim_s)

    @property
    def reader(self) -> Reader:
        """The reading port."""
        return self._inner.reader

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)


class Interposed:
    """A reader that lets something happen once, right after it has read checkpoints."""

    def __init__(self, inner: Reader, happens: Callable[[], Awaitable[object]]) -> None:
        self._inner = inner
        self._happens: Callable[[], Awaitable[object]] | None = happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def list_checkpoints(
        self, run_id: str, *, before: int | None, limit: int
    ) -> list[CheckpointRow]:
        """Read, and then let it happen."""
        rows = await self._inner.list_checkpoints(run_id, before=before, limit=limit)
        happens, self._happens = self._happens, None
        if happens is not None:
            await happens()
        return rows


@pytest.fixture
def zoo(tmp_path: Path) -> ToolZoo:
    """The tools of the zoo."""
    return ToolZoo(tmp_path / "journal.jsonl")


@asynccontextmanager
async def engine_over(
    path: Path,
    agents: list[HostedAgent],
    zoo: ToolZoo,
    *,
    plan: Plan | None = None,
    settings: EngineSettings = SETTINGS,
    claim_s: float = 0.0,
) -> AsyncGenerator[Embedded]:
    """Run an engine over a file whose store has a trap; on leaving, verify finds nothing."""
    async with Faulty(SqliteDatabase(path / "perdure.db"), Trap(plan), claim_s) as database:
        async with embedded(database, agents, tools=zoo.registry, settings=settings) as engine:
            yield engine
            zoo.open_gate()
        await assert_sound(database)


def once(wish: Decision, *tools: str) -> HostedAgent:
    """An agent that decides this, and then finishes with what it was told."""

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return wish
        return Finish(answer=[record.status for record in context.turns[0].calls])

    return scripted("once", decide, tools=[*unasked(*tools), "echo", "swallow_cancel"])


DYING = EngineSettings(
    lease_ttl_s=0.6,
    heartbeat_s=0.1,
    lease_margin_s=0.1,
    poll_interval_s=0.05,
    maintenance_interval_s=0.05,
    cancel_grace_s=0.1,
    drain_grace_s=1.0,
)


async def test_a_payment_that_the_lookup_denies_is_made_after_all(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """R-5.7: the worker died before the effect; the lookup says so, and the call runs again."""
    agent = once(call("pay_with_lookup", amount=4), "pay_with_lookup")
    async with engine_over(tmp_path, [agent], zoo, settings=DYING) as engine:
        async with _killed_in(engine, zoo):
            run_id = await engine.submit("once")
        await engine.start_worker()
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert [line["amount"] for line in zoo.payments()] == [4]
        results = [event.data for event in await engine.events(run_id) if event.type == "result"]
        assert [data.status for data in results if isinstance(data, ResultEvent)] == [
            ToolCallStatus.SUCCEEDED
        ]


@asynccontextmanager
async def _killed_in(engine: Embedded, zoo: ToolZoo) -> AsyncGenerator[None]:
    """Kill the worker between the commit of an execution and the call of its tool."""
    invoke, reached = engine.tools.invoke, anyio.Event()

    async def never(_: object) -> Any:
        reached.set()
        await anyio.sleep_forever()

    engine.tools.invoke = never  # pyright: ignore[reportAttributeAccessIssue]  # put back below
    yield
    await reached.wait()
    await engine.kill_worker()
    engine.tools.invoke = invoke
    assert zoo.payments() == []


async def test_a_result_whose_acknowledgement_was_lost_is_not_told_as_late(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """Decision 8: the commit that gave the lease up is sent again though no lease is left."""
    plan = Plan(boundary=Boundary.RESULT, when=When.ACK_LOST, report=tmp_path / "report")
    agent = scripted(
        "asks", [calls(("echo", {"value": 1}), ("pay", {"amount": 1}))], tools=["echo", "pay"]
    )
    async with engine_over(tmp_path, [agent], zoo, plan=plan) as engine:
        run_id = await engine.submit("asks")
        await engine.wait_waiting(run_id)
        with anyio.fail_after(30):
            while engine.worker.held_runs:  # noqa: ASYNC110  # the attempt's own end is no event
                await anyio.sleep(0.01)
        await engine.drain()
        assert plan.report.exists()
        assert await engine.core.reader.list_late(run_id) == []


async def test_a_worker_whose_store_is_away_at_its_end_ends_in_order(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """R-20.1, F12: what it holds runs out by itself."""

    class Away:
        """A store that takes no lease back."""

        def __init__(self, store: Store) -> None:
            self._store = store

        def __getattr__(self, name: str) -> object:
            return getattr(self._store, name)

        async def release_runs(self, worker_id: str, leases: Sequence[LeaseKey]) -> int:
            del worker_id, leases
            raise Unavailable("the database is away")

    settings = replace(DYING, drain_grace_s=0.1)
    async with engine_over(
        tmp_path, [once(call("hang"), "hang")], zoo, settings=settings
    ) as engine:
        await engine.stop()
        store: Any = Away(engine.core.store)
        core = replace(engine.core, store=store)
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        run_id = await engine.submit("once")
        await zoo.wait_started("hang")
        await engine.drain()
        zoo.open_gate()
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_a_view_is_of_one_moment_though_others_write_while_it_is_read(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """I25: the seq and the checkpoint of a view fit each other, so the chain has no gap."""
    agent = scripted("payer", [call("pay", amount=1)], tools=["pay"])
    async with engine_over(tmp_path, [agent], zoo) as engine:
        run_id = await engine.submit("payer")
        (question,) = await engine.wait_waiting(run_id)
        await engine.kill_worker()
        before = await engine.run(run_id)

        async def answer() -> None:
            await engine.answer(question.interrupt_id, Answer.APPROVE)

        reader: Any = Interposed(engine.core.reader, answer)
        view = await load_view(replace(engine.core, reader=reader), before)
        after = await engine.run(run_id)
        assert after.hot.last_seq > before.hot.last_seq
        assert (view.snapshot.last_seq, view.checkpoint_seq) in [_place(before), _place(after)]


def _place(row: RunRow) -> tuple[int, int | None]:
    return row.hot.last_seq, row.hot.checkpoint_seq


async def test_what_a_given_up_tool_says_before_its_lookup_is_recorded_is_late(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """I50: the execution was given up at its timeout, though its call ended well by the lookup."""
    noted = threading.Event()

    def look(effect_key: str) -> Returned:
        noted.wait(5)
        return succeeded({"paid": 1}, external_ref=effect_key)

    @tool(
        name="never_answers",
        side_effect="write",
        idempotent=False,
        timeout_s=0.1,
        compensation="by hand",
        lookup=look,
    )
    async def never_answers() -> None:
        """Take effect, and answer only when it is given up."""
        with anyio.CancelScope() as scope:
            await anyio.sleep_forever()
        del scope

    zoo.registry.add(never_answers)
    agent = once(call("never_answers"), "never_answers")
    async with engine_over(tmp_path, [agent], zoo) as engine:
        run_id = await engine.submit("once")
        await engine.wait_event(run_id, "late")
        noted.set()
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED


async def test_a_commit_that_is_answered_while_its_caller_is_cancelled_is_answered(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """The answer and the cancellation come in one turn of the loop; neither may be lost."""
    scope, told = anyio.CancelScope(), Committed(seq=1, at=SystemClock().now())

    class Answers:
        async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
            del commits
            scope.cancel()
            return [told]

    agent = once(call("echo", value=1))
    got: list[CommitResult] = []
    async with engine_over(tmp_path, [agent], zoo) as engine:
        run_id = await engine.submit("once")
        row = await engine.wait_terminal(run_id)
        store: Any = Answers()
        committer = Committer(replace(engine.core, store=store))
        async with anyio.create_task_group() as group:
            group.start_soon(committer.run)
            with anyio.fail_after(30), scope:
                got.append(await committer.commit(commit_of(row)))
            group.cancel_scope.cancel()
    assert got == [told]


class SilentAtFirst(LoopHeartbeat):
    """A heartbeat that renews nothing, and stops what runs out, until it is told to beat."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.beats = anyio.Event()

    async def run(self, holder: Holder) -> None:
        """Wait, then beat until cancelled."""
        while not self.beats.is_set():
            holder.stop_expired()
            with anyio.move_on_after(0.02):
                await self.beats.wait()
        await super().run(holder)


async def test_an_attempt_that_winds_up_leaves_the_next_one_of_its_worker_its_lease(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """F03: the worker lost the run and claimed it again while its tool was still being given up."""
    agent = once(call("swallow_cancel"))
    settings = replace(DYING, cancel_grace_s=0.5)
    async with engine_over(tmp_path, [agent], zoo, settings=settings) as engine:
        await engine.drain()
        heartbeat = SilentAtFirst(engine.core)
        await engine.run_worker(
            Worker(
                core=engine.core,
                catalog=engine.catalog,
                tools=engine.tools,
                policy=engine.policy,
                heartbeat=heartbeat,
            )
        )
        run_id = await engine.submit("once")
        await zoo.wait_started("swallow_cancel", 2)
        heartbeat.beats.set()
        await anyio.sleep(settings.cancel_grace_s + 2 * settings.lease_ttl_s)
        zoo.open_gate()
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert row.hot.attempt == 2


async def test_a_run_that_was_claimed_too_late_to_be_trusted_is_handed_back(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """F03: the process stood still while it claimed; that is no fault of the run."""
    agent = once(call("echo", value=1))
    late_s = DYING.lease_ttl_s - DYING.lease_margin_s / 2
    async with engine_over(tmp_path, [agent], zoo, settings=DYING, claim_s=late_s) as engine:
        run_id = await engine.submit("once")
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        attempts = await engine.core.reader.list_attempts(run_id)
        assert [row.end_reason for row in attempts] == [AttemptEnd.DRAINED, AttemptEnd.FINISHED]
