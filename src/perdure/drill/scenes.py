"""The scenes of a drill: a fault on purpose each, and what has to be true after it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import anyio
from pydantic import JsonValue

from perdure.drill.agents import AMOUNT, ASKED, FOUND, GATED, PLAIN, REFUNDED, REPEATED
from perdure.drill.stage import TENANT, WHO, Stage
from perdure.engine.approvals import leave_as_it_is
from perdure.engine.load import load_view
from perdure.engine.unheld import unheld_draft
from perdure.protocol.errors import AlreadyAnswered, Conflict, Gone, PerdureError, Unavailable
from perdure.protocol.events import CustomEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import status_of
from perdure.protocol.states import Answer, InterruptKind, ParkedOn, RunState, RunStatus
from perdure.service.repairs import RepairRequest, get_repair, repair
from perdure.signals.ports import QUEUE_TOPIC
from perdure.store.commits import Committed

ORDERS = 10
"""So often the same order, and the same approval, is sent at once."""
HINTS = 50
ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class Scene:
    """A scene by name."""

    name: str
    title: str
    play: Callable[[Stage], Awaitable[None]]


async def kill_after_tool(stage: Stage) -> None:
    """Kill a worker when three calls have taken effect and none has its result recorded."""
    run_id = await stage.order("kill")
    async with stage.mortal_worker() as process:
        await process.wait()
    paid = stage.outside.payments(run_id)
    if len(paid) != 3:
        log = (stage.folder / "worker.log").read_text(encoding="utf-8", errors="replace")
        stage.problems.append(f"the worker did not come as far as it should: {log[-500:]}")
        return
    async with stage.worker():
        questions = await stage.asked(run_id)
        outcome = [item for item in questions if item.kind is InterruptKind.OUTCOME]
        stage.check(
            stage.outside.executions(run_id, REPEATED) > 1,
            healed="an idempotent tool was run again under its key",
            problem="the idempotent tool was not run again",
        )
        stage.check(
            stage.outside.executions(run_id, FOUND) == 1,
            healed="a tool with a lookup was asked, and not run again",
            problem="the tool with a lookup was run again",
        )
        if len(outcome) != 1:
            stage.problems.append(f"{len(outcome)} questions about an outcome instead of one")
            return
        stage.person.append(
            "whether a call of a tool with neither took effect is asked of a person: "
            "`perdure interrupts resolve … --happened` or `--retry`"
        )
        await stage.answer(outcome[0].interrupt_id, Answer.HAPPENED, value={"paid": AMOUNT})
        row = await stage.ended(run_id)
    _all_paid_once(stage, run_id, (REPEATED, FOUND, PLAIN))
    stage.check(
        row.hot.state is RunState.SUCCEEDED,
        healed="the run succeeded in another worker",
        problem=f"the run ended {row.hot.state} {row.hot.code or ''}",
    )


async def duplicate_approval(stage: Stage) -> None:
    """Approve many times at once, and reject afterwards."""
    async with stage.worker():
        run_id = await stage.order("approval")
        (question,) = await stage.asked(run_id)
        counted: list[bool] = []

        async def approve() -> None:
            done = await stage.answer(question.interrupt_id, Answer.APPROVE)
            counted.append(not done.replayed)

        async with anyio.create_task_group() as group:
            for _ in range(ORDERS):
                group.start_soon(approve)
        stage.check(
            counted.count(True) == 1,
            healed=f"of {ORDERS} equal approvals at once one counted, the others were told so",
            problem=f"{counted.count(True)} of {ORDERS} approvals counted",
        )
        refused = await _refusal(stage.answer(question.interrupt_id, Answer.REJECT))
        stage.check(
            isinstance(refused, AlreadyAnswered),
            healed="an opposite answer was refused with the first one",
            problem=f"an opposite answer was answered with {refused!r}",
        )
        row = await stage.ended(run_id)
    _all_paid_once(stage, run_id, (ASKED,))
    if row.hot.state is not RunState.SUCCEEDED:
        stage.problems.append(f"the run ended {row.hot.state} {row.hot.code or ''}")


async def approval_timeout(stage: Stage) -> None:
    """Answer an approval too late."""
    async with stage.worker():
        run_id = await stage.order("approval", timeouts={"approval_s": ANSWER_S})
        asked = await stage.asked(run_id)
        row = await stage.ended(run_id)
        stage.check(
            row.hot.code is FailureCode.APPROVAL_TIMEOUT and not stage.outside.payments(run_id),
            healed=f"the run ended APPROVAL_TIMEOUT after {ANSWER_S:g} s, and nothing was paid",
            problem=f"the run ended {row.hot.state} {row.hot.code or ''}",
        )
        if asked:  # a slow machine may look only after the time is over
            refused = await _refusal(stage.answer(asked[0].interrupt_id, Answer.APPROVE))
            stage.check(
                isinstance(refused, Gone),
                healed="an approval that came later was refused",
                problem=f"an approval that came later was answered with {refused!r}",
            )
    stage.person.append(
        "whoever asked for the run has to ask again: `perdure runs retry` goes on from it"
    )


async def queue_replay(stage: Stage) -> None:
    """Order the same many times, wake workers for nothing, and hand the run out again while its
    first worker is only slow."""
    key = stage.core.ids.new("key")
    found: set[str] = set()

    async def order() -> None:
        found.add(await stage.order("replay", key))

    async with anyio.create_task_group() as group:
        for _ in range(ORDERS):
            group.start_soon(order)
    stage.check(
        len(found) == 1,
        healed=f"{ORDERS} equal orders at once made one run",
        problem=f"{ORDERS} equal orders made {len(found)} runs",
    )
    run_id = found.pop()
    async with stage.worker(mute=True):
        await stage.seen(lambda: stage.outside.executions(run_id, GATED) == 1)
        async with stage.worker():
            for _ in range(HINTS):
                stage.core.signals.publish(QUEUE_TOPIC)
            row = await stage.ended(run_id)
            stage.outside.open_gate(run_id)
            while not await stage.core.reader.list_late(run_id):  # noqa: ASYNC110  # no signal tells
                await anyio.sleep(ANSWER_S / 10)
    stage.check(
        row.hot.state is RunState.SUCCEEDED and row.hot.attempt > 1,
        healed="a run whose worker fell silent was handed to another one, and succeeded",
        problem=f"the run ended {row.hot.state} in attempt {row.hot.attempt}",
    )
    stage.healed.append("the first worker's result came too late: kept as evidence, not merged")
    _all_paid_once(stage, run_id, (GATED,))


async def cancel_with_partial_success(stage: Stage) -> None:
    """Cancel a run that has done a part of its work, and is in the middle of the rest."""
    async with stage.worker():
        run_id = await stage.order("cancel")
        await stage.seen(lambda: stage.outside.executions(run_id, GATED) == 1)
        await stage.cancel(run_id, compensate=True)
        row = await stage.ended(run_id)
        stage.outside.open_gate(run_id)
    status = status_of(row.hot)
    stage.check(
        status is RunStatus.INTERRUPTED,
        healed="the run was stopped in the middle of a call",
        problem=f"the run ended {status}",
    )
    amounts = [line["amount"] for line in stage.outside.payments(run_id)]
    stage.check(
        amounts.count(-AMOUNT) == 1 and sum(amounts) == AMOUNT,
        healed="a tool that can undo its call did so, once",
        problem=f"the journal says {amounts}",
    )
    told = {str(item["tool"]) for item in await _effects(stage, run_id, row.hot.terminal_seq)}
    stage.check(
        {REFUNDED, PLAIN} <= told,
        healed="the end of the run tells what was done, and what became of it",
        problem=f"the end of the run tells only of {', '.join(sorted(told)) or 'nothing'}",
    )
    stage.person.append(
        "what a tool without compensation did is told in the run's end, and stays: "
        f"{PLAIN} says how to undo it by hand"
    )


async def checkpoint_disagreement(stage: Stage) -> None:
    """Write a checkpoint to which the log does not fold."""
    async with stage.worker():
        run_id = await stage.order("damage")
        (question,) = await stage.asked(run_id)
        await _write_wrong_checkpoint(stage, run_id)
        refused = await _refusal(stage.answer(question.interrupt_id, Answer.RESPOND, value="on"))
        row = await stage.row(run_id)
        stage.check(
            isinstance(refused, Conflict) and row.hot.parked_on is ParkedOn.REPAIR,
            healed="the damage was noticed, and the run put aside before it went on",
            problem=f"the run went on: it waits for {row.hot.parked_on}, told {refused!r}",
        )
        if stage.problems:
            return
        found = await get_repair(stage.service, WHO, run_id)
        stage.check(
            found.can_return,
            healed="its last consistent checkpoint was found, without a side effect behind it",
            problem=f"it cannot be returned: {'; '.join(found.obstacles)}",
        )
        if not found.can_return:
            fail = RepairRequest(action="fail", reason="a recovery drill")
            await repair(stage.service, WHO, run_id, fail)
            return
        stage.person.append(
            "returning it is a person's decision: `perdure runs repair RUN --return --reason …` "
            "(or `worker.on_damage = return`)"
        )
        back = RepairRequest(action="return", reason="a recovery drill")
        goes_on = (await repair(stage.service, WHO, run_id, back)).run_id
        stage.run_ids.add(goes_on)
        (again,) = await stage.asked(goes_on)
        await stage.answer(again.interrupt_id, Answer.RESPOND, value="on")
        row = await stage.ended(goes_on)
    stage.check(
        row.hot.state is RunState.SUCCEEDED,
        healed="it went on from there as a linked run, which succeeded",
        problem=f"the run that went on ended {row.hot.state} {row.hot.code or ''}",
    )
    _all_paid_once(stage, run_id, (REPEATED,))


SCENES = (
    Scene("kill-after-tool", "a worker is killed right after its tools acted", kill_after_tool),
    Scene("duplicate-approval", "an approval is given many times", duplicate_approval),
    Scene("approval-timeout", "nobody answers an approval in time", approval_timeout),
    Scene("queue-replay", "orders, hints and the run itself come twice", queue_replay),
    Scene(
        "cancel-partial-success",
        "a run is cancelled when a part is done",
        cancel_with_partial_success,
    ),
    Scene("checkpoint-disagreement", "checkpoint and log do not agree", checkpoint_disagreement),
)


# ---------------------------------------------------------------- parts of scenes


def _all_paid_once(stage: Stage, run_id: str, tools: tuple[str, ...]) -> None:
    paid = sorted(line["tool"] for line in stage.outside.payments(run_id))
    stage.check(
        paid == sorted(tools),
        healed="every effect is in the world exactly once",
        problem=f"the effects in the world are {', '.join(paid) or 'none'}",
    )


async def _refusal(request: Awaitable[object]) -> PerdureError | None:
    """Return the error of a request; None when it was accepted."""
    try:
        await request
    except PerdureError as error:
        return error
    return None


async def _effects(stage: Stage, run_id: str, seq: int | None) -> list[dict[str, JsonValue]]:
    """Return the effects that a run's end tells."""
    events = await stage.core.reader.events_after(run_id, (seq or 1) - 1, limit=1)
    end = events[0].data if events else None
    return list(end.effects or []) if isinstance(end, StateEvent) else []


async def _write_wrong_checkpoint(stage: Stage, run_id: str) -> None:
    """Add an event to a run of the drill that waits, with a checkpoint of another digest."""
    row = await stage.core.reader.find_run(TENANT, run_id)
    assert row is not None, "it was just ordered"
    draft = unheld_draft(stage.core, await load_view(stage.core, row, with_messages=False), row)
    draft.now = await stage.core.reader.now()
    draft.add(CustomEvent(name="perdure.drill", value="the checkpoint here is wrong on purpose"))
    leave_as_it_is(row, draft)
    draft.with_checkpoint = True
    commit = draft.build()
    assert commit.checkpoint is not None, "it was asked for"
    commit.checkpoint = replace(commit.checkpoint, digest="0" * 64)
    (result,) = await stage.core.store.commit([commit])
    if not isinstance(result, Committed):
        raise Unavailable(f"the fault could not be written: {result}")
