"""Undoing what a cancelled run did, when its cancel asks for it (R-5.6, R-5.7, R-9.4)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import pytest

from perdure.engine import compensation
from perdure.engine.callbacks import call_back
from perdure.engine.compensation import TRIES_MAX
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.engine.undone import strongest
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.events import (
    ActionEvent,
    CancelEvent,
    CompensationEvent,
    ResultEvent,
    StateEvent,
)
from perdure.protocol.runs import status_of
from perdure.protocol.states import (
    CancelAction,
    CancelOption,
    ParkedOn,
    RunState,
    RunStatus,
    ToolCallStatus,
)
from perdure.protocol.tools import ToolResult
from perdure.service.base import Service
from perdure.service.branches import RetryRequest, retry
from perdure.service.principal import LOCAL
from perdure.store.commits import Commit
from perdure.testing.embedded import (
    SETTINGS,
    Embedded,
    call,
    calls,
    new_worker,
    scripted,
    unasked,
)
from perdure.testing.faults import BusyStore
from perdure.testing.runners import ScarceToolRunner
from perdure.testing.tools import ToolZoo
from perdure.tools import (
    FunctionTool,
    Performed,
    Returned,
    ToolContext,
    ToolError,
    ToolUnavailable,
    agent_as_tool,
    not_happened,
    pending,
    succeeded,
    tool,
)
from tests.flow.world import data_of, flow, swept_until

COMPENSATE = CancelOption.COMPENSATE
QUICK = replace(SETTINGS, lease_margin_s=0.05)
"""A try that was cut off is known to be so within a second."""


@dataclass(slots=True)
class Shop:
    """A shop that can be ordered from, and what it was asked, in order. `down`: how many of the
    next wishes to undo find it closed.
    """

    log: list[str] = field(default_factory=list[str])
    keys: list[str] = field(default_factory=list[str])
    down: int = 0
    undoing: anyio.Event = field(default_factory=anyio.Event)
    asked: anyio.Event = field(default_factory=anyio.Event)

    def order(self, item: str) -> Returned:
        """Take an order."""
        self.log.append(f"order {item}")
        return succeeded({"item": item}, external_ref=f"o-{item}")

    def undo(self, performed: Performed, context: ToolContext) -> dict[str, str]:
        """Take an order back."""
        self.log.append(f"undo {performed.external_ref} {performed.output}")
        self.keys.append(context.effect_key)
        if self.down:
            self.down -= 1
            raise ToolUnavailable("the shop is closed")
        return {"refund": str(performed.external_ref)}

    async def undo_slowly(self, performed: Performed, context: ToolContext) -> None:
        """Take an order back; the first time it never answers."""
        self.log.append(f"undo {performed.external_ref}")
        self.keys.append(context.effect_key)
        if not self.undoing.is_set():
            self.undoing.set()
            await anyio.sleep_forever()

    def tools(self) -> list[FunctionTool[..., Any]]:
        """Return the shop's tools, all on the engine's loop."""
        declared: dict[str, Any] = {
            "side_effect": "external",
            "timeout_s": 0.2,
            "trusted": True,
            "idempotent": False,
        }

        slow: dict[str, Any] = {**declared, "timeout_s": 60}

        def refuse(performed: Performed) -> None:
            self.log.append(f"refuse {performed.args}")
            raise ToolError("it was sent already")

        def find(effect_key: str) -> Returned:
            del effect_key
            return (
                succeeded("found", external_ref="o-lost") if self.asked.is_set() else not_happened()
            )

        @tool(compensate=self.undo, **declared)
        def order(item: str) -> Returned:
            return self.order(item)

        @tool(compensate=refuse, **declared)
        def send(item: str) -> Returned:
            return self.order(item)

        @tool(compensation="none exists", **declared)
        def shout(item: str) -> Returned:
            return self.order(item)

        @tool(compensate=self.undo_slowly, compensate_idempotent=True, **declared)
        def order_twice(item: str) -> Returned:
            return self.order(item)

        @tool(compensate=self.undo_slowly, **declared)
        def order_once(item: str) -> Returned:
            return self.order(item)

        @tool(compensate=self.undo, lookup=find, **slow)
        async def order_and_hang(item: str) -> Returned:
            self.order(item)
            self.asked.set()
            await anyio.sleep_forever()
            return succeeded()

        return [order, send, shout, order_twice, order_once, order_and_hang]


NAMES = ("order", "send", "shout", "order_twice", "order_once", "order_and_hang")


def buyer(
    script: Sequence[Decision], *, agent_id: str = "buyer", more: Sequence[str] = ()
) -> HostedAgent:
    """An agent that follows a script, unasked but for `pay`, which a person must approve."""

    def decide(context: PlannerContext) -> Decision:
        done = len(context.turns)
        return script[done] if done < len(script) else Finish(answer="done")

    return scripted(agent_id, decide, tools=(*unasked(*NAMES, *more), "pay"))


async def cancelled(engine: Embedded, run_id: str) -> list[dict[str, Any]]:
    """Return the report in the terminal event of a cancelled run."""
    row = await engine.wait_terminal(run_id)
    assert status_of(row.hot) is RunStatus.INTERRUPTED
    (end,) = [
        event
        for event in data_of(await engine.events(run_id), StateEvent)
        if event.state is RunState.FAILED
    ]
    assert end.effects is not None
    return end.effects


def undone(report: list[dict[str, Any]]) -> dict[str, str]:
    """Return what became of undoing the call of each tool."""
    told = {effect["tool"]: effect["compensation"] for effect in report}
    return {name: status for name, status in told.items() if status != "not_needed"}


async def test_calls_are_undone_in_reverse_and_the_end_tells_what_remains(
    url: str, zoo: ToolZoo, caplog: pytest.LogCaptureFixture
) -> None:
    """R-9.4: each try is in the log before and after, under a key of its own (R-5.6). What stays
    is told to operators, too (R-17.3).
    """
    shop = Shop(down=1)
    zoo.registry.add(*shop.tools())
    script = [
        calls(("order", {"item": "a"})),
        calls(("send", {"item": "b"})),
        calls(("shout", {"item": "c"})),
        calls(("order", {"item": "d"})),
        call("pay", amount=1),
    ]
    async with flow(url, [buyer(script)], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        row = await engine.cancel(run_id, options=COMPENSATE)
        assert (
            status_of(row.hot) is RunStatus.CANCEL_REQUESTED
        )  # at once, before anything is undone
        report = await cancelled(engine, run_id)
        ask_d, ask_a = "undo o-d {'item': 'd'}", "undo o-a {'item': 'a'}"
        assert shop.log[4:] == [ask_d, ask_d, "refuse {'item': 'b'}", ask_a]
        told = {effect["external_ref"]: effect["compensation"] for effect in report}
        assert told.pop(None) == "not_needed"  # what a person was still asked about
        expected = {"o-d": "succeeded", "o-c": "none", "o-b": "failed", "o-a": "succeeded"}
        assert told == expected
        stays = [one.getMessage() for one in caplog.records if "stays" in one.getMessage()]
        assert ["o-b" in text for text in stays] == [True, False]
        assert f"run {run_id}: what shout did stays: undoing it: none" in stays[1]
        counted = engine.core.metrics.text().decode()
        for status, count in (("succeeded", 2.0), ("failed", 1.0), ("none", 1.0)):
            assert f'perdure_compensations_total{{status="{status}"}} {count}' in counted
        events = await engine.events(run_id)
        tries = data_of(events, CompensationEvent)
        assert [(item.status, item.number, item.again) for item in tries[:4]] == [
            ("started", 1, False),
            ("failed", 1, True),
            ("started", 2, False),
            ("succeeded", 2, False),
        ]
        assert tries[3].detail == {"refund": "o-d"}
        effect_keys = {action.effect_key for action in data_of(events, ActionEvent)}
        first, second, other = shop.keys
        assert first == second != other
        assert not effect_keys & set(shop.keys)
        assert {item.key for item in tries} >= {first, other}
        again = await engine.cancel(run_id, options=COMPENSATE)
        assert again.hot == (await engine.run(run_id)).hot


async def test_a_cancel_that_does_not_ask_undoes_nothing(url: str, zoo: ToolZoo) -> None:
    """R-9.4: `when asked`."""
    shop = Shop()
    zoo.registry.add(*shop.tools())
    script = [call("order", item="a"), call("pay", amount=1)]
    async with flow(url, [buyer(script)], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.cancel(run_id)
        effects = await cancelled(engine, run_id)
        assert not any("compensation" in effect for effect in effects)
        assert shop.log == ["order a"]


async def test_a_call_in_flight_that_took_effect_is_undone_too(url: str, zoo: ToolZoo) -> None:
    """R-5.7, R-9.2: the holder's cancel, with a lookup that finds the order."""
    shop = Shop()
    zoo.registry.add(*shop.tools())
    async with flow(url, [buyer([call("order_and_hang", item="a")])], zoo) as engine:
        run_id = await engine.submit("buyer")
        await shop.asked.wait()
        await engine.cancel(run_id, options=COMPENSATE)
        report = await cancelled(engine, run_id)
        assert undone(report) == {"order_and_hang": "succeeded"}
        assert shop.log == ["order a", "undo o-lost found"]


async def test_what_a_lookup_finds_of_a_call_that_was_cut_off_is_undone_too(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.7, R-9.2: an execution on the user's loop is cut off as of unknown outcome; that had
    counted for more than its tool's lookup, and nothing was undone."""
    asked: list[str] = []

    def find(effect_key: str) -> Returned:
        asked.append("find")
        del effect_key
        return succeeded("found", external_ref="o-lost")

    def undo(performed: Performed) -> None:
        asked.append(f"undo {performed.external_ref}")

    @tool(side_effect="external", idempotent=False, timeout_s=60, lookup=find, compensate=undo)
    async def order_apart() -> str:
        """Order, and never answer."""
        zoo.begin("order_apart")
        await anyio.sleep_forever()
        return ""

    zoo.registry.add(order_apart)
    agent = buyer([call("order_apart")], more=["order_apart"])
    zoo.registry.add(*Shop().tools())
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("buyer")
        await zoo.wait_started("order_apart")
        await engine.cancel(run_id, options=COMPENSATE)
        assert undone(await cancelled(engine, run_id)) == {"order_apart": "succeeded"}
        assert asked == ["find", "undo o-lost"]
        (result,) = data_of(await engine.events(run_id), ResultEvent)
        assert (result.status, result.by) == (ToolCallStatus.SUCCEEDED, "lookup")


def test_what_one_run_of_a_tree_has_undone_stays_undone_though_another_could_not() -> None:
    """R-9.4: a run below that tried and failed does not make the one above try it again."""
    above = {"a": "succeeded", "b": "failed", "c": "unknown"}
    below = {"a": "failed", "b": "unknown", "c": "not_started", "d": "failed"}
    told = {"a": "succeeded", "b": "unknown", "c": "unknown", "d": "failed"}
    assert strongest(above, below) == strongest(below, above) == told


async def test_a_try_that_a_crash_cut_off_is_never_run_twice_in_silence(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.7: again under the same key where that is harmless, else its outcome is unknown."""
    for name, expected, asked in (("order_twice", "succeeded", 2), ("order_once", "unknown", 1)):
        shop = Shop()
        with ToolZoo(zoo.journal) as tools:
            tools.registry.add(*shop.tools())
            script = [call("order", item="first"), call(name, item="a"), call("pay", amount=1)]
            async with flow(url, [buyer(script, agent_id=name)], tools, settings=QUICK) as engine:
                run_id = await engine.submit(name)
                await engine.wait_waiting(run_id)
                await engine.cancel(run_id, options=COMPENSATE)
                await shop.undoing.wait()
                await engine.kill_worker()
                await engine.start_worker()
                report = await cancelled(engine, run_id)
                assert undone(report) == {"order": "succeeded", name: expected}
                assert shop.log.count("undo o-a") == asked
                assert len(set(shop.keys)) == 2  # one of each call


async def test_a_tree_undoes_what_its_runs_did_each_once(url: str, zoo: ToolZoo) -> None:
    """R-9.4, R-9.5: a child that goes on undoes its own; its parent what ended children did."""
    shop = Shop()
    zoo.registry.add(
        *shop.tools(),
        agent_as_tool("done", name="ask_done"),
        agent_as_tool("busy", name="ask_busy"),
    )
    agents = [
        buyer(
            [call("order", item="1"), call("ask_done", task="go"), call("ask_busy", task="go")],
            more=("ask_done", "ask_busy"),
        ),
        buyer([call("order", item="2")], agent_id="done"),
        buyer([call("order", item="3"), call("order_and_hang", item="4")], agent_id="busy"),
    ]
    async with flow(url, agents, zoo) as engine:
        run_id = await engine.submit("buyer")
        await shop.asked.wait()
        await engine.cancel(run_id, options=COMPENSATE)
        report = await cancelled(engine, run_id)
        undos = [line.split()[1] for line in shop.log if line.startswith("undo")]
        assert undos == ["o-lost", "o-3", "o-2", "o-1"]
        below = [effect for effect in report if "run_id" in effect]
        assert [effect["external_ref"] for effect in below] == ["o-2"]


async def test_a_later_cancel_may_ask_for_more(url: str, zoo: ToolZoo) -> None:
    """R-9.1: while the run has not ended; the action stays the stronger one."""
    shop = Shop()
    zoo.registry.add(*shop.tools())
    script = [call("order", item="a"), call("pay", amount=1)]
    async with flow(url, [buyer(script)], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.kill_worker()
        await engine.cancel(run_id, CancelAction.ROLLBACK, options=COMPENSATE)
        row = await engine.cancel(run_id, options=CancelOption.DISCARD_ARTIFACTS)
        assert row.hot.cancel_action is CancelAction.ROLLBACK
        assert row.hot.cancel_options == COMPENSATE | CancelOption.DISCARD_ARTIFACTS
        assert [
            (item.epoch, item.action, item.compensate, item.discard_artifacts)
            for item in data_of(await engine.events(run_id), CancelEvent)
        ] == [(1, CancelAction.ROLLBACK, True, False), (2, CancelAction.ROLLBACK, True, True)]
        await engine.start_worker()
        row = await engine.wait_terminal(run_id)
        assert status_of(row.hot) is RunStatus.CANCELED
        assert shop.log == ["order a", "undo o-a {'item': 'a'}"]


async def test_what_no_worker_can_undo_in_time_is_reported(url: str, zoo: ToolZoo) -> None:
    """R-9.4: a cancel ends, also when nobody serves the tool any more."""
    shop = Shop()
    zoo.registry.add(*shop.tools())
    script = [call("order", item="a"), call("pay", amount=1)]
    settings = replace(SETTINGS, compensation_deadline_s=0.3)
    async with flow(url, [buyer(script)], zoo, settings=settings) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.kill_worker()
        await engine.cancel(run_id, options=COMPENSATE)
        await swept_until(engine, run_id, lambda row: row.hot.finished_at is not None)
        assert undone(await cancelled(engine, run_id)) == {"order": "not_started"}
        assert shop.log == ["order a"]


async def test_a_try_that_did_not_begin_uses_up_none(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-9.4: tools that hold every place keep others waiting, and make nothing fail for good."""
    monkeypatch.setattr(compensation, "RETRY_S", 0.01)
    shop = Shop()
    zoo.registry.add(*shop.tools())
    script = [call("order", item="a"), call("pay", amount=1)]
    async with flow(url, [buyer(script)], zoo, runner=ScarceToolRunner) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        assert isinstance(engine.tools, ScarceToolRunner)
        engine.tools.full, engine.tools.stuck = 1, TRIES_MAX + 2
        engine.tools.wishes.clear()
        await engine.cancel(run_id, options=COMPENSATE)
        assert undone(await cancelled(engine, run_id)) == {"order": "succeeded"}
        tries = data_of(await engine.events(run_id), CompensationEvent)
        ends = [(item.status, item.begun) for item in tries if item.status != "started"]
        assert ends == [("failed", False)] * (TRIES_MAX + 2) + [("succeeded", True)]
        assert len(engine.tools.wishes) == TRIES_MAX + 4  # without a place nothing was written


async def test_what_a_blocking_tool_keeps_from_beginning_is_told_as_not_started(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: until `worker.compensation_deadline_s`, and never as failed."""
    shop = Shop()
    zoo.registry.add(*shop.tools())
    script = [call("order", item="a"), call("pay", amount=1)]
    settings = replace(SETTINGS, compensation_deadline_s=0.5)

    async with flow(
        url, [buyer(script)], zoo, settings=settings, runner=ScarceToolRunner
    ) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        assert isinstance(engine.tools, ScarceToolRunner)
        engine.tools.stuck = 1_000_000
        await engine.cancel(run_id, options=COMPENSATE)
        assert undone(await cancelled(engine, run_id)) == {"order": "not_started"}
        assert shop.log == ["order a"]


async def test_what_came_of_undoing_is_recorded_though_the_runs_row_stays_locked(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-5.7: it did not happen in silence, and nobody has to look what became of it."""
    shop = Shop()
    zoo.registry.add(*shop.tools())

    def ends_a_try(commit: Commit) -> bool:
        told = [event.data for event in commit.events if isinstance(event.data, CompensationEvent)]
        return bool(told) and told[-1].status != "started"

    async with flow(url, [buyer([call("order", item="a"), call("pay", amount=1)])], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.stop()
        store = BusyStore(engine.core.store, 25, ends_a_try)
        core = replace(engine.core, store=store)
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        await engine.cancel(run_id, options=COMPENSATE)
        assert undone(await cancelled(engine, run_id)) == {"order": "succeeded"}
        assert store.left == 0
        tries = data_of(await engine.events(run_id), CompensationEvent)
        assert [item.status for item in tries] == ["started", "succeeded"]
        assert shop.log == ["order a", "undo o-a {'item': 'a'}"]


async def test_a_try_of_unknown_outcome_is_told_though_later_ones_failed(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-5.7: the first try may have undone it; a person has to look."""
    monkeypatch.setattr(compensation, "RETRY_S", 0.01)
    tries: list[int] = []

    async def undo(performed: Performed, context: ToolContext) -> None:
        del performed, context
        tries.append(1)
        if len(tries) == 1:
            await anyio.sleep_forever()
        raise ToolUnavailable("the shop is closed")

    @tool(
        side_effect="external",
        timeout_s=0.2,
        trusted=True,
        idempotent=False,
        compensate=undo,
        compensate_idempotent=True,
    )
    def book(item: str) -> str:
        return item

    zoo.registry.add(*Shop().tools(), book)
    script = [call("book", item="a"), call("pay", amount=1)]
    async with flow(url, [buyer(script, more=("book",))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.cancel(run_id, options=COMPENSATE)
        assert undone(await cancelled(engine, run_id)) == {"book": "unknown"}
        assert len(tries) == TRIES_MAX


async def test_a_callback_while_others_are_undone_is_taken_and_undone_too(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.10: the run has not ended, so what is told of its call counts."""
    shop = Shop()
    taken = anyio.Event()

    async def undo(performed: Performed, context: ToolContext) -> None:
        del context
        shop.log.append(f"undo {performed.output}")
        if performed.output == "first":
            shop.undoing.set()
            await taken.wait()

    declared: dict[str, Any] = {
        "side_effect": "external",
        "timeout_s": 5,
        "trusted": True,
        "idempotent": False,
        "compensate": undo,
    }

    @tool(**declared)
    def book() -> str:
        return "first"

    @tool(**declared)
    def book_later() -> Returned:
        return pending(external_ref="later")

    zoo.registry.add(*shop.tools(), book, book_later)
    script = [calls(("book", {}), ("book_later", {}))]
    async with flow(url, [buyer(script, more=("book", "book_later"))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CALLBACK)
        rows = await engine.core.reader.list_tool_calls(run_id, after=None, limit=10)
        (later,) = [row for row in rows if row.tool == "book_later"]
        await engine.cancel(run_id, options=COMPENSATE)
        await shop.undoing.wait()
        result = ToolResult(status=ToolCallStatus.SUCCEEDED, output="second")
        for replayed in (False, True):
            back = await call_back(engine.core, engine.tenant_id, later.tool_call_id, result)
            assert (back.replayed, back.row.status) == (replayed, ToolCallStatus.SUCCEEDED)
        taken.set()
        report = await cancelled(engine, run_id)
        assert undone(report) == {"book": "succeeded", "book_later": "succeeded"}
        assert shop.log == ["undo first", "undo second"]


async def test_a_retry_tells_the_effects_that_it_shares_and_undoes_its_own(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-10.3: with the run that did them."""
    shop = Shop()
    zoo.registry.add(*shop.tools())
    script = [call("order", item="a"), call("send", item="b"), call("pay", amount=1)]
    async with flow(url, [buyer(script)], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
        made = await retry(Service(core=engine.core), LOCAL, run_id, RetryRequest())
        await engine.wait_waiting(made.run.run_id)
        asked = len(shop.log)
        await engine.cancel(made.run.run_id, options=COMPENSATE)
        report = await cancelled(engine, made.run.run_id)
        told = {one["tool"]: (one.get("run_id"), one["compensation"]) for one in report}
        assert told["order"] == (run_id, "none")
        assert told["pay"] == (None, "not_needed")
        assert len(shop.log) == asked
