"""A clean history: one run of each kind that the engine can make today, by the real engine.

`make_history` fills an empty SQLite file and returns the runs by the name of their scene. Some
end, some wait, one is held, one is queued, one is put aside.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import anyio

from perdure.agents.catalog import loop_agent
from perdure.agents.code import Context, agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.breakpoints import continue_run
from perdure.engine.callbacks import call_back
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent, PlannerFailure, ToolGrant
from perdure.engine.state_updates import StateWish, update_state
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    ChildRequest,
    Decision,
    Finish,
    Handoff,
    ModelUse,
    Publish,
    Sleep,
    Spawn,
    ToolRequest,
    WriteField,
)
from perdure.protocol.events import PlanItem, Usage
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.fields import StateField
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.runs import RunRow
from perdure.protocol.states import (
    Answer,
    CancelAction,
    CancelOption,
    ParkedOn,
    RunState,
    ToolCallStatus,
)
from perdure.protocol.tools import ToolResult
from perdure.protocol.topics import SubscriptionTerms
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, RetryRequest, fork, retry
from perdure.service.principal import LOCAL
from perdure.service.repairs import RepairRequest, repair
from perdure.service.topics import subscribe
from perdure.store.reader import RunFilter
from perdure.store.requests import CancelWish, ClaimWant
from perdure.store.sqlite import SqliteDatabase
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import (
    Embedded,
    call,
    calls,
    embedded,
    scripted,
    unasked,
)
from perdure.testing.tools import ToolZoo
from perdure.tools import FunctionTool, ToolContext, ToolUnavailable, tool

LASTING = (
    StateField(name="sum", scope="agent", rule="add"),
    StateField(name="seen", scope="thread", rule="append"),
)
DONE = Finish(answer="done")
BIG = "x" * 20_000
HOUR = timedelta(hours=1)


def _use(text: str) -> ModelUse:
    return ModelUse(
        model="scripted", text=text, usage=Usage(input_tokens=10, output_tokens=5, cost=0.01)
    )


def _plain() -> list[Decision]:
    wish = ToolRequest(tool="echo", args={"value": 1})
    return [
        CallTools(
            calls=(wish, wish.model_copy(update={"args": {"value": 2}})),
            model_uses=(_use("first"),),
            state={"seen": 1},
            plan=(PlanItem(text="look", status="in_progress"),),
        ),
        call("echo", value=3).model_copy(update={"model_uses": (_use("second"),)}),
        Finish(answer={"sum": 6}, model_uses=(_use("third"),)),
    ]


def _stumbling(context: PlannerContext) -> Decision:
    """Fail twice as a model may, then go on."""
    if context.model_failures < 2:
        failure = Failure(
            code=FailureCode.MODEL_ERROR, reason="busy", retryable=True, stage=Stage.PLANNING
        )
        raise PlannerFailure(failure, model_uses=(_use(""),))
    return DONE


def _spoken(context: PlannerContext) -> Decision:
    """Say two fragments' worth, then something short."""
    assert context.open_message is not None
    text = "word " * 2000 if context.step_index == 0 else "done"
    message = context.open_message()
    message.say(text)
    use = _use(text).model_copy(update={"message_id": message.message_id})
    if context.step_index == 0:
        return call("echo", value=1).model_copy(update={"model_uses": (use,)})
    return Finish(answer=text, model_uses=(use,))


class _Bug:
    """Raises once, as a planner with a bug would; then it is mended."""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, context: PlannerContext) -> Decision:
        if not self.raised:
            self.raised = True
            raise KeyError("a bug of the planner")
        return DONE


def _wobbly(zoo: ToolZoo) -> FunctionTool[..., Any]:
    @tool(retry=RetryPolicy(attempts_max=3, backoff_s=0.01))
    def wobbly() -> str:
        """Be unavailable once."""
        if zoo.begin("wobbly") == 1:
            raise ToolUnavailable("down")
        return "up"

    return cast("FunctionTool[..., Any]", wobbly)


def _stubborn(zoo: ToolZoo) -> FunctionTool[..., Any]:
    @tool
    async def stubborn(context: ToolContext) -> str:
        """Finish its work when it is cancelled, within the grace period."""
        zoo.begin("stubborn")
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        context.artifact("work.txt", "done all the same", "text/plain")
        return "finished"

    return cast("FunctionTool[..., Any]", stubborn)


@agent("coded", "1", tools=["echo"], state=[StateField(name="sum", rule="add")])
async def coded(ctx: Context, input: object) -> object:
    """A step, two branches, a question."""
    ctx.emit("begun", input)
    await ctx.step(str, "first")

    async def branch(number: int) -> object:
        told = await ctx.tool("echo", value=number)
        ctx.write("sum", number)
        return [told, await ctx.tool("echo", value=-number)]

    told = await ctx.gather(branch(1), branch(2))
    return [told, await ctx.interrupt("go on?", key="on")]


def _family() -> list[Decision]:
    """Spawn a child that ends, one that asks, and one that goes its own way."""
    wishes = (
        ChildRequest(agent_id="plain", key="ends"),
        ChildRequest(agent_id="asking", key="asks"),
        ChildRequest(agent_id="idle", key="alone", detach=True),
    )
    return [Spawn(children=wishes), Finish(answer="together")]


def _publish(value: int) -> Publish:
    return Publish(topic="news", value=value)


def _talk() -> list[Decision]:
    """Let two speak who last, one of them twice."""
    first = ChildRequest(agent_id="idle", key="a", participant="a")
    second = ChildRequest(agent_id="idle", key="b", participant="b")
    return [Spawn(children=(first, second)), Spawn(children=(first,)), Finish(answer="all said")]


def _keeping() -> list[Decision]:
    """Write fields of the thread and of the agent, then again with the answer."""
    first = (WriteField(field="sum", value=1), WriteField(field="seen", value="x" * 600))
    wish = call("echo", value=1).model_copy(update={"records": first})
    return [wish, Finish(answer="kept", records=(WriteField(field="sum", value=2),))]


def agents() -> list[HostedAgent]:
    """Return the agents of the scenes."""
    ask = Ask(title="Which one?", key="which", expires_in=HOUR)
    quick = RetryPolicy(attempts_max=3, backoff_s=0.01)
    pay = ["pay"]
    return [
        scripted("plain", _plain(), tools=["echo"]),
        scripted("approved", [call("pay", amount=1), DONE], tools=pay),
        scripted(
            "siblings",
            [calls(("pay", {"amount": 2}), ("echo", {"value": 1})), DONE],
            tools=[*pay, "echo"],
        ),
        scripted("artist", [call("draw", text="a"), call("draw", text="b"), DONE], tools=["draw"]),
        scripted("big", [call("echo", value=BIG), Finish(answer=BIG)], tools=["echo"]),
        scripted("wobbly", [call("wobbly"), DONE], tools=["wobbly"]),
        scripted("looping", lambda _: call("echo", value=1), tools=["echo"]),
        scripted("late", [call("pay_late", amount=3), DONE], tools=unasked("pay_late")),
        scripted("hanging", [call("hang"), DONE], tools=["hang"]),
        scripted("pair", [calls(("hang", {}), ("hang", {})), DONE], tools=["hang"]),
        scripted("stubborn", [call("stubborn"), DONE], tools=["stubborn"]),
        scripted("found", [call("pay_then_hang", amount=4), DONE], tools=unasked("pay_then_hang")),
        scripted("asking", [ask, DONE]),
        scripted("sleeping", [Sleep(duration=timedelta(days=1)), DONE]),
        scripted("napping", [Sleep(duration=timedelta(0)), DONE]),
        scripted("stumbling", _stumbling, model_retry=quick),
        scripted("buggy", _Bug()),
        scripted("wrong", [call("nothing", x=1), call("echo", wrong=1), DONE], tools=["echo"]),
        scripted(
            "passed.on",
            [call("pay", amount=2), DONE],
            tools=[
                ToolGrant(name="pay", approvers=("bob",), escalate_after_s=60, escalate_to=("ada",))
            ],
        ),
        scripted(
            "undone",
            [call("pay_refundable", amount=5), call("pay", amount=1)],
            tools=[*unasked("pay_refundable"), "pay"],
        ),
        scripted(
            "sketching", [call("draw", text="c"), call("pay", amount=1)], tools=["draw", "pay"]
        ),
        scripted("idle", [DONE]),
        scripted("later", [call("order_later", amount=1), DONE], tools=unasked("order_later")),
        scripted("paused", [call("echo", value=1), DONE], tools=["echo"]),
        scripted("spoken", _spoken, tools=["echo"]),
        coded,
        scripted("family", _family()),
        scripted("talk", _talk()),
        scripted("herald", [Finish(answer="news", records=(_publish(1), _publish(2)))]),
        scripted("handing", [Handoff(agent_id="takes.over", reason="its field")]),
        scripted("takes.over", lambda _: DONE),
        loop_agent("keeper", "1", ScriptedPlanner(_keeping()), tools=["echo"], state=LASTING),
    ]


Runs = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A file, the runs in it by scene, and the time at its end, by its own clock."""

    path: Path
    journal: Path
    """What the tools of these runs did outside."""
    runs: Mapping[str, str]
    at: datetime


async def make_history(path: Path, journal: Path) -> History:
    """Fill an empty file. Nothing runs any more then."""
    clock = ShiftingClock()
    runs: Runs = {}
    with ToolZoo(journal) as zoo:
        zoo.registry.add(_wobbly(zoo), _stubborn(zoo))
        async with (
            SqliteDatabase(path, clock=clock) as database,
            embedded(database, agents(), tools=zoo.registry) as engine,
        ):
            await _ended(engine, runs)
            await _answered(engine, runs, clock)
            await _cancelled(engine, runs, zoo)
            await _lost(engine, runs, zoo, clock)
            await _branched(engine, runs)
            await _families(engine, runs)
            await _standing(engine, runs)
            await engine.stop()
            await _held(engine, runs)
    return History(path=path, journal=journal, runs=runs, at=clock())


async def _ended(engine: Embedded, runs: Runs) -> None:
    """Runs that end by themselves."""
    runs["paused"] = await engine.submit("paused", breakpoints=[{"at": "before_tool"}])
    (pause,) = await engine.wait_waiting(runs["paused"])
    for key in ("one", "two"):
        wish = StateWish(state={"said": key}, by="ada", reason="by hand", key=key)
        await update_state(engine.core, runs["paused"], wish)
    await continue_run(
        engine.core,
        engine.tenant_id,
        runs["paused"],
        pause.interrupt_id,
        mode="next",
        by="ada",
    )
    await engine.wait_terminal(runs["paused"])
    runs["spoken"] = await engine.submit("spoken", stream=True)
    await engine.wait_terminal(runs["spoken"])
    for name in ("plain", "artist", "big", "wobbly", "napping", "stumbling", "wrong", "idle"):
        runs[name] = await engine.submit(name, idempotency_key=f"key-{name}")
    runs["keyed"] = await engine.submit("idle", idempotency_key="another key")
    runs["large input"] = await engine.submit("idle", BIG)
    first = await engine.run(runs["plain"])
    runs["second of thread"] = await engine.submit("plain", thread_id=first.facts.thread_id)
    runs["max steps"] = await engine.submit("plain", max_steps=1)
    runs["looping"] = await engine.submit("looping", loop_limit=2)
    runs["buggy"] = await engine.submit("buggy")
    for run_id in runs.values():
        await engine.wait_terminal(run_id)


async def _answered(engine: Embedded, runs: Runs, clock: ShiftingClock) -> None:
    """Runs whose questions are answered, or are not in time."""
    answers: dict[str, tuple[Answer, dict[str, Any]]] = {
        "approved": (Answer.APPROVE, {}),
        "edited": (Answer.EDIT, {"args": {"amount": 7}}),
        "told": (Answer.RESPOND, {"value": "not now"}),
        "rejected": (Answer.REJECT, {}),
    }
    for scene, (answer, words) in answers.items():
        runs[scene] = await engine.submit("approved")
        [question] = await engine.wait_waiting(runs[scene])
        await engine.answer(question.interrupt_id, answer, **words)
        await engine.wait_terminal(runs[scene])
    runs["passed on"] = await engine.submit("passed.on")
    [question] = await engine.wait_waiting(runs["passed on"])
    clock.advance(61)
    await engine.wait_event(runs["passed on"], "custom")
    await engine.answer(question.interrupt_id, Answer.APPROVE)
    await engine.wait_terminal(runs["passed on"])
    runs["siblings"] = await engine.submit("siblings")
    [question] = await engine.wait_waiting(runs["siblings"])
    await engine.answer(question.interrupt_id, Answer.APPROVE)
    await engine.wait_terminal(runs["siblings"])
    runs["asked"] = await engine.submit("asking")
    [question] = await engine.wait_waiting(runs["asked"])
    await engine.answer(question.interrupt_id, Answer.RESPOND, value={"which": 2})
    await engine.wait_terminal(runs["asked"])
    runs["coded"] = await engine.submit("coded")
    [question] = await engine.wait_waiting(runs["coded"])
    await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
    await engine.wait_terminal(runs["coded"])
    runs["expired"] = await engine.submit("asking")
    await engine.wait_waiting(runs["expired"])
    runs["timed out"] = await engine.submit("sleeping", timeouts={"run_s": 600})
    runs["delayed done"] = await engine.submit("idle", after=600)
    await engine.wait_event(runs["timed out"], "step")
    clock.advance(2 * 3600)
    await engine.wait_terminal(runs["expired"])
    await engine.wait_terminal(runs["timed out"])
    await engine.wait_terminal(runs["delayed done"])


async def _cancelled(engine: Embedded, runs: Runs, zoo: ToolZoo) -> None:
    """Runs that are cancelled: waiting, queued, and in the middle of a payment."""
    runs["cancelled waiting"] = await engine.submit("asking")
    await engine.wait_waiting(runs["cancelled waiting"])
    thread_id = (await engine.run(runs["cancelled waiting"])).facts.thread_id
    runs["cancelled queued"] = await engine.submit("idle", thread_id=thread_id)
    await engine.cancel(runs["cancelled queued"], CancelAction.ROLLBACK)
    runs["superseding"] = await engine.submit(
        "idle", thread_id=thread_id, multitask_strategy="interrupt"
    )
    runs["branched"] = await engine.submit("idle", thread_id=thread_id, multitask_strategy="fork")
    runs["stubborn"] = await engine.submit("stubborn")
    await zoo.wait_started("stubborn")
    await engine.cancel(runs["stubborn"])
    runs["late"] = await engine.submit("late")
    await zoo.wait_started("pay_late")
    await engine.cancel(runs["late"])
    for scene in ("cancelled waiting", "cancelled queued", "stubborn", "late"):
        await engine.wait_terminal(runs[scene])
    runs["undone"] = await engine.submit("undone")
    await engine.wait_waiting(runs["undone"])
    await engine.cancel(runs["undone"], options=CancelOption.COMPENSATE)
    await engine.wait_terminal(runs["undone"])
    runs["discarded"] = await engine.submit("sketching")
    await engine.wait_waiting(runs["discarded"])
    await engine.cancel(runs["discarded"], options=CancelOption.DISCARD_ARTIFACTS)
    await engine.wait_terminal(runs["discarded"])
    runs["cancelled pair"] = await engine.submit("pair")
    await zoo.wait_started("hang", 2)
    wish = CancelWish(action=CancelAction.INTERRUPT, by="ada", source="api")
    await engine.core.store.request_cancel(runs["cancelled pair"], wish)  # without its signal
    zoo.open_gate()
    await engine.wait_terminal(runs["cancelled pair"])
    with anyio.fail_after(30):
        while not await engine.core.reader.list_late(runs["late"]):  # noqa: ASYNC110  # no signal
            await anyio.sleep(0.01)
    zoo.gate.clear()


async def _lost(engine: Embedded, runs: Runs, zoo: ToolZoo, clock: ShiftingClock) -> None:
    """Runs whose worker dies in the middle of a call; another one takes them over."""
    for scene, name in (("retried", "late"), ("lost", "hanging"), ("found", "found")):
        runs[scene] = await engine.submit(name)
    runs["happened"] = await engine.submit("late")
    await zoo.wait_started("pay_late", 3)
    await zoo.wait_started("hang", 3)
    await zoo.wait_started("pay_then_hang")
    await engine.kill_worker()
    clock.advance(60)
    zoo.open_gate()
    await engine.start_worker()
    [question] = await engine.wait_waiting(runs["retried"])
    await engine.answer(question.interrupt_id, Answer.RETRY)
    [question] = await engine.wait_waiting(runs["happened"])
    await engine.answer(
        question.interrupt_id, Answer.HAPPENED, value={"paid": 3}, external_ref="order-9"
    )
    for scene in ("retried", "lost", "found", "happened"):
        await engine.wait_terminal(runs[scene])


async def _branched(engine: Embedded, runs: Runs) -> None:
    """A run that goes on from a failed one."""
    service = Service(core=engine.core)
    wish = RetryRequest.model_validate({"options": {"max_steps": 5}})
    made = await retry(service, LOCAL, runs["max steps"], wish)
    runs["goes on"] = made.run.run_id
    for scene, steps in (("keeps", 9), ("keeps not", 1), ("keeps again", 9)):
        first = runs.get("keeps")
        thread_id = None if first is None else (await engine.run(first)).facts.thread_id
        runs[scene] = await engine.submit("keeper", thread_id=thread_id, max_steps=steps)
        await engine.wait_terminal(runs[scene])
    await engine.wait_terminal(runs["goes on"])
    made = await fork(service, LOCAL, runs["artist"], ForkRequest(input="another", state={"n": 1}))
    runs["forked"] = made.run.run_id
    await engine.wait_terminal(runs["forked"])
    runs["returned"] = await engine.submit("undone")
    await engine.wait_waiting(runs["returned"])
    await engine.core.store.quarantine(runs["returned"], None, "nothing moves it", None)
    back = RepairRequest(action="return", reason="the disk is mended")
    runs["after a return"] = (await repair(service, LOCAL, runs["returned"], back)).run_id
    await engine.wait_waiting(runs["after a return"])


async def _families(engine: Embedded, runs: Runs) -> None:
    """Trees: one that ended, one that was cancelled, one that waits; and a run handed over."""
    for scene in ("family", "cancelled family", "waiting family"):
        runs[scene] = await engine.submit("family", budget={"tool_calls": 20})
        await engine.wait_until(runs[scene], lambda row: row.hot.open_children == 1)
        where = RunFilter(root_run_id=runs[scene])
        below = await engine.core.reader.list_runs(None, where, after=None, limit=10)
        for row in below:
            runs[f"{row.facts.agent_id} of {scene}"] = row.facts.run_id
        await engine.wait_terminal(runs[f"idle of {scene}"])
        await engine.wait_waiting(runs[f"asking of {scene}"])
    [question] = await engine.pending(runs["asking of family"])
    await engine.answer(question.interrupt_id, Answer.RESPOND, value={"which": 1})
    await engine.cancel(runs["cancelled family"])
    runs["handed over"] = await engine.submit("handing")
    runs["talk"] = await engine.submit("talk")
    thread_id = (await engine.run(runs["family"])).facts.thread_id
    service = Service(core=engine.core)
    for agent_id in ("idle", "plain"):
        await subscribe(service, LOCAL, thread_id, "news", agent_id, SubscriptionTerms())
    runs["herald"] = await engine.submit("herald", thread_id=thread_id)
    for scene in ("family", "cancelled family", "handed over", "talk", "herald"):
        await engine.wait_terminal(runs[scene])
    for scene in ("talk", "herald"):
        where = RunFilter(parent_run_id=runs[scene])
        below = await engine.core.reader.list_runs(None, where, after=None, limit=10)
        for place, row in enumerate(below):
            runs[f"{place} of {scene}"] = row.facts.run_id
            await engine.wait_terminal(row.facts.run_id)


async def _standing(engine: Embedded, runs: Runs) -> None:
    """Runs that wait: for a person, for a callback, for a time, for their turn."""
    for scene in ("called back", "calling"):
        runs[scene] = await engine.submit("later")
        await engine.wait_until(runs[scene], lambda row: row.hot.parked_on is ParkedOn.CALLBACK)
    [row] = await engine.core.reader.list_tool_calls(runs["called back"], after=None, limit=2)
    result = ToolResult(status=ToolCallStatus.SUCCEEDED, output=1)
    await call_back(engine.core, engine.tenant_id, row.tool_call_id, result)
    await engine.wait_terminal(runs["called back"])
    runs["waiting"] = await engine.submit("asking", timeouts={"run_s": 3600})
    await engine.wait_waiting(runs["waiting"])
    runs["approving"] = await engine.submit("siblings", timeouts={"approval_s": 3600})
    await engine.wait_waiting(runs["approving"])
    thread_id = (await engine.run(runs["waiting"])).facts.thread_id
    runs["queued"] = await engine.submit("idle", thread_id=thread_id)
    runs["delayed"] = await engine.submit("idle", after=86_400)
    runs["sleeping"] = await engine.submit("sleeping", timeouts={"run_s": 100_000})
    await engine.wait_until(runs["sleeping"], _is_unheld_planning)


def _is_unheld_planning(row: RunRow) -> bool:
    hot = row.hot
    return hot.state is RunState.PLANNING and hot.lease_owner is None and hot.step_index == 1


async def _held(engine: Embedded, runs: Runs) -> None:
    """Runs in the hands of a worker that never comes back, and one that is put aside."""
    store = engine.core.store
    for scene in ("held", "put aside"):
        runs[scene] = await engine.submit("idle")
    want = ClaimWant(worker_id="wrk_ghost", limit=2, lease_ttl_s=30, serves=(("idle", "1"),))
    tokens = {item.row.facts.run_id: item.token for item in await store.claim_runs(want)}
    assert set(tokens) == {runs["held"], runs["put aside"]}
    aside = runs["put aside"]
    assert await store.quarantine(aside, tokens[aside], "the log is damaged", 0)
