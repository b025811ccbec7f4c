"""Questions to people: answered once, at the point that asked, also after a restart (R-8)."""

from datetime import timedelta

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.protocol.decisions import Ask, CallTools, Decision, Finish, ToolRequest
from perdure.protocol.errors import AlreadyAnswered, Gone, Invalid, PerdureError
from perdure.protocol.events import ApprovalRequestEvent, ResultEvent, StateEvent, TimeoutEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import (
    Answer,
    InterruptKind,
    InterruptStatus,
    OnExpiry,
    RunState,
    ToolCallStatus,
)
from perdure.testing.embedded import Embedded, call, calls, scripted, unasked
from perdure.testing.tools import WRITE, ToolZoo
from perdure.tools import Returned, succeeded, tool
from tests.flow.world import data_of, flow, states, types

PAY = call("pay", amount=5)


def _report(context: PlannerContext) -> Decision:
    """Pay once, then tell what became of it."""
    if not context.turns:
        return PAY
    record = context.turns[0].calls[0]
    error = record.error.reason if record.error is not None else None
    return Finish(answer={"status": record.status, "output": record.output, "error": error})


def payer() -> HostedAgent:
    """An agent whose payment needs an approval."""
    return scripted("payer", _report, tools=["pay"])


async def asked(engine: Embedded) -> tuple[str, str]:
    """Start a payment; return the run and its open approval, once nobody holds the run."""
    run_id = await engine.submit("payer")
    (question,) = await engine.wait_waiting(run_id)
    row = await engine.run(run_id)
    assert row.hot.lease_owner is None
    return run_id, question.interrupt_id


async def restarted(engine: Embedded) -> None:
    """Replace the worker while a run waits."""
    await engine.kill_worker()
    await engine.start_worker()


async def answer_of(engine: Embedded, run_id: str) -> object:
    """Return the answer of a run once it has succeeded."""
    row = await engine.wait_terminal(run_id)
    assert row.hot.state is RunState.SUCCEEDED
    events = await engine.events(run_id)
    return data_of(events, StateEvent)[-1].answer


async def test_an_approved_call_runs_once_after_a_restart(url: str, zoo: ToolZoo) -> None:
    """R-8.1, R-8.3, RES-04: the same run goes on from the pending call."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await asked(engine)
        await restarted(engine)
        answered = await engine.answer(question, Answer.APPROVE, reason="fine")
        assert not answered.replayed
        assert answered.row.answered_by == "ada"
        told = await answer_of(engine, run_id)
        assert told == {"status": "succeeded", "output": {"paid": 5}, "error": None}
        assert len(zoo.payments()) == 1


async def test_an_edit_runs_the_edited_arguments(url: str, zoo: ToolZoo) -> None:
    """R-8.3, decision 26: the effective arguments are those of the person."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await asked(engine)
        await restarted(engine)
        await engine.answer(question, Answer.EDIT, args={"amount": 3})
        await answer_of(engine, run_id)
        assert [line["amount"] for line in zoo.payments()] == [3]
        (row,) = await engine.core.reader.list_tool_calls(run_id, after=None, limit=10)
        assert row.args_digest != row.effective_digest


async def test_an_edit_against_the_schema_changes_nothing(url: str, zoo: ToolZoo) -> None:
    """Decision 26: edits are checked when answered."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await asked(engine)
        with pytest.raises(Invalid):
            await engine.answer(question, Answer.EDIT, args={"amount": "three"})
        assert [item.interrupt_id for item in await engine.pending(run_id)] == [question]
        await engine.answer(question, Answer.APPROVE)
        await answer_of(engine, run_id)


async def test_a_response_reaches_the_planner_instead_of_running(url: str, zoo: ToolZoo) -> None:
    """R-8.3: respond gives feedback without execution."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await asked(engine)
        await restarted(engine)
        await engine.answer(question, Answer.RESPOND, value="ask again tomorrow")
        told = await answer_of(engine, run_id)
        assert isinstance(told, dict)
        assert (told["status"], told["output"]) == ("denied", "ask again tomorrow")
        assert zoo.payments() == []


async def test_a_rejection_fails_the_run(url: str, zoo: ToolZoo) -> None:
    """R-8.3: reject ends the run with APPROVAL_REJECTED."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await asked(engine)
        await restarted(engine)
        await engine.answer(question, Answer.REJECT, reason="too much")
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.APPROVAL_REJECTED
        assert zoo.payments() == []
        (question_row,) = [await engine.core.reader.find_interrupt(None, question)]
        assert question_row is not None
        assert question_row.answer == Answer.REJECT


async def test_an_unanswered_approval_expires(url: str, zoo: ToolZoo) -> None:
    """R-8.3, R-10.4: expiry has its own code and event."""
    async with flow(url, [payer()], zoo) as engine:
        run_id = await engine.submit("payer", timeouts={"approval_s": 0.2})
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.APPROVAL_TIMEOUT
        (told,) = data_of(await engine.events(run_id), TimeoutEvent)
        assert told.subject == "approval"
        assert 150 <= told.limit_ms <= 250
        (asked_for,) = data_of(await engine.events(run_id), ApprovalRequestEvent)
        with pytest.raises(Gone):
            await engine.answer(asked_for.approval_id, Answer.APPROVE)
        assert zoo.payments() == []


async def test_an_expiry_that_fails_the_run_asks_tools_what_became_of_open_calls(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.7, R-8.3: a call whose outcome a person was asked about is looked up once more."""
    looked: list[str] = []

    def look(effect_key: str) -> Returned | None:
        looked.append(effect_key)
        return None if len(looked) == 1 else succeeded("sent after all")

    @tool(idempotent=False, lookup=look, **WRITE)
    async def send() -> str:
        """Never answer."""
        await anyio.sleep_forever()
        return "never"

    zoo.registry.add(send)
    agent = scripted(
        "sends",
        lambda _: calls(("send", {}), ("pay", {"amount": 1})),
        tools=[*unasked("send"), ToolGrant(name="pay", approve="always")],
    )
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("sends", timeouts={"approval_s": 1.0, "tool_s": 0.1})
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.APPROVAL_TIMEOUT
        results = {item.status: item for item in data_of(await engine.events(run_id), ResultEvent)}
        assert results[ToolCallStatus.SUCCEEDED].output == "sent after all"
        assert len(looked) == 2


async def test_the_same_answer_twice_is_accepted_and_another_is_refused(
    url: str, zoo: ToolZoo
) -> None:
    """R-8.2, CON-07: the identical answer is idempotent, another refused, also after the end."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await asked(engine)
        await engine.answer(question, Answer.APPROVE)
        assert (await engine.answer(question, Answer.APPROVE, by="bob")).replayed
        with pytest.raises(AlreadyAnswered) as refused:
            await engine.answer(question, Answer.REJECT)
        assert refused.value.details["answer"] == Answer.APPROVE
        assert "with approve by " in refused.value.message
        await answer_of(engine, run_id)
        assert (await engine.answer(question, Answer.APPROVE)).replayed
        before = await engine.run(run_id)
        with pytest.raises(AlreadyAnswered):
            await engine.answer(question, Answer.EDIT, args={"amount": 7})
        assert await engine.run(run_id) == before
        assert len(await engine.core.reader.list_executions(run_id)) == len(zoo.payments()) == 1


async def test_a_response_to_an_approval_says_something(url: str, zoo: ToolZoo) -> None:
    """R-8.2: it is what the planner is told, and final; nothing is no response."""
    async with flow(url, [payer()], zoo) as engine:
        _, question = await asked(engine)
        with pytest.raises(Invalid) as refused:
            await engine.answer(question, Answer.RESPOND)
        assert refused.value.field == "/value"
        await engine.answer(question, Answer.RESPOND, value="not today")


async def test_of_opposite_answers_at_once_one_counts(url: str, zoo: ToolZoo) -> None:
    """F29: parallel opposite answers have one resolution."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await asked(engine)
        outcomes: list[str] = []

        async def give(answer: Answer) -> None:
            try:
                await engine.answer(question, answer)
                outcomes.append(answer)
            except PerdureError as error:
                outcomes.append(error.code)

        async with anyio.create_task_group() as group:
            for answer in (Answer.APPROVE, Answer.REJECT) * 4:
                group.start_soon(give, answer)
        row = await engine.wait_terminal(run_id)
        won = {outcome for outcome in outcomes if outcome in {Answer.APPROVE, Answer.REJECT}}
        assert len(won) == 1
        approved = won == {Answer.APPROVE}
        assert (row.hot.state is RunState.SUCCEEDED) is approved
        assert len(zoo.payments()) == int(approved)
        assert types(await engine.events(run_id)).count("resume") == 1


async def test_an_answer_after_a_cancel_is_gone(url: str, zoo: ToolZoo) -> None:
    """CAN-04, HITL-01: cancel closes the question; a later answer changes nothing; the thread goes on."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await asked(engine)
        await restarted(engine)
        row = await engine.cancel(run_id)
        assert row.hot.code is FailureCode.RUN_CANCELLED
        closed = await engine.core.reader.find_interrupt(None, question)
        assert closed is not None
        assert closed.status is InterruptStatus.CANCELLED
        with pytest.raises(Gone):
            await engine.answer(question, Answer.APPROVE)
        assert states(await engine.events(run_id))[-1] == RunState.FAILED
        assert zoo.payments() == []
        after = await engine.submit("payer", thread_id=row.facts.thread_id)
        (other,) = await engine.wait_waiting(after)
        await engine.answer(other.interrupt_id, Answer.APPROVE)
        await answer_of(engine, after)


async def test_one_approval_does_not_cover_the_next_call(url: str, zoo: ToolZoo) -> None:
    """HITL-03: each call of a tool is asked for by itself; what is approved are its arguments."""

    def twice(context: PlannerContext) -> Decision:
        amount = len(context.turns) + 1
        return call("pay", amount=amount) if amount < 3 else Finish(answer="paid")

    async with flow(url, [scripted("twice", twice, tools=["pay"])], zoo) as engine:
        run_id = await engine.submit("twice")
        (first,) = await engine.wait_waiting(run_id)
        await engine.answer(first.interrupt_id, Answer.APPROVE)
        await engine.wait_event(run_id, "approval_request", after=first.opened_seq)
        (second,) = await engine.wait_waiting(run_id)
        assert second.interrupt_id != first.interrupt_id
        assert len(zoo.payments()) == 1
        await engine.answer(second.interrupt_id, Answer.APPROVE)
        await answer_of(engine, run_id)
        assert [line["amount"] for line in zoo.payments()] == [1, 2]


async def test_allowed_siblings_run_while_a_question_is_open(url: str, zoo: ToolZoo) -> None:
    """Decision 21, DUP-08: an answer beside a running call starts nothing twice."""
    script = calls(("pay", {"amount": 1}), ("hang", {}))

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="both") if context.turns else script

    async with flow(url, [scripted("both", decide, tools=["pay", "hang"])], zoo) as engine:
        run_id = await engine.submit("both")
        asked_event = await engine.wait_event(run_id, "approval_request")
        await zoo.wait_started("hang")
        assert isinstance(asked_event.data, ApprovalRequestEvent)
        question = asked_event.data.approval_id
        assert (await engine.answer(question, Answer.APPROVE)).row.answer == Answer.APPROVE
        await zoo.wait_started("pay")
        assert zoo.executions == {"pay": 1, "hang": 1}
        zoo.open_gate()
        await answer_of(engine, run_id)
        assert zoo.executions == {"pay": 1, "hang": 1}


async def test_a_question_of_the_planner_takes_an_answer_by_its_schema(url: str) -> None:
    """R-8.5: the payload's schema validates the answer; the value returns to that point."""
    ask = Ask(title="How many?", key="count", answer_schema={"type": "integer", "minimum": 1})

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer=context.turns[0].asks[0].value) if context.turns else ask

    async with flow(url, [scripted("asker", decide)]) as engine:
        run_id = await engine.submit("asker")
        (question,) = await engine.wait_waiting(run_id)
        with pytest.raises(Invalid):
            await engine.answer(question.interrupt_id, Answer.RESPOND, value="many")
        with pytest.raises(Invalid):
            await engine.answer(question.interrupt_id, Answer.APPROVE)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=4)
        assert await answer_of(engine, run_id) == 4


async def test_a_question_in_a_loop_repeats_no_work(url: str, zoo: ToolZoo) -> None:
    """RES-01: three rounds are three executions and three questions, each answered once."""

    def decide(context: PlannerContext) -> Decision:
        turns = context.turns
        if turns and turns[-1].asks and turns[-1].asks[-1].value == "yes":
            return Finish(answer=len(turns))
        if turns and turns[-1].calls:
            return Ask(title="good?")
        return call("echo", value=len(turns))

    async with flow(url, [scripted("rounds", decide, tools=["echo"])], zoo) as engine:
        run_id = await engine.submit("rounds")
        seen = 0
        for value in ("no", "no", "yes"):
            event = await engine.wait_event(run_id, "interrupt", after=seen)
            seen = event.seq
            (question,) = await engine.wait_waiting(run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=value)
        assert await answer_of(engine, run_id) == 6
        assert zoo.executions == {"echo": 3}


async def test_an_expired_question_that_may_be_denied_tells_the_planner(url: str) -> None:
    """R-8.3: what happens on expiry is named when the question is asked."""
    ask = Ask(title="still there?", expires_in=timedelta(seconds=0.1), on_expiry=OnExpiry.DENY)

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer=context.turns[0].asks[0].outcome) if context.turns else ask

    async with flow(url, [scripted("patient", decide)]) as engine:
        run_id = await engine.submit("patient")
        assert await answer_of(engine, run_id) == "expired"


@pytest.mark.parametrize(
    ("answer", "status", "payments"),
    [
        (Answer.HAPPENED, ToolCallStatus.SUCCEEDED, 1),
        (Answer.RETRY, ToolCallStatus.SUCCEEDED, 2),
        (Answer.SKIP, ToolCallStatus.FAILED, 1),
    ],
)
async def test_an_unknown_outcome_is_for_a_person_to_clear(
    url: str, zoo: ToolZoo, answer: Answer, status: ToolCallStatus, payments: int
) -> None:
    """R-5.7, F02: never a silent second execution; each answer works."""
    agent = scripted(
        "late",
        lambda context: (
            Finish(answer=context.turns[0].calls[0].status)
            if context.turns
            else CallTools(calls=(ToolRequest(tool="pay_late", args={"amount": 7}),))
        ),
        tools=["pay_late"],
    )
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("late", timeouts={"tool_s": 0.2})
        (approval,) = await engine.wait_waiting(run_id)
        await engine.answer(approval.interrupt_id, Answer.APPROVE)
        await zoo.wait_started("pay_late")
        await engine.wait_event(run_id, "interrupt")
        (question,) = await engine.wait_waiting(run_id)
        zoo.open_gate()
        await engine.wait_event(run_id, "late")
        await engine.answer(question.interrupt_id, answer, external_ref=_ref(answer))
        assert await answer_of(engine, run_id) == status
        assert len(zoo.payments()) == payments


def _ref(answer: Answer) -> str | None:
    return "invoice-1" if answer is Answer.HAPPENED else None


async def test_an_approval_without_a_call_has_no_arguments_to_edit(url: str) -> None:
    """R-8.3, R-21.3: refused with the field; the question stays open."""
    script = [Ask(ask=InterruptKind.APPROVAL, title="Go on?"), Finish(answer="went on")]
    async with flow(url, [scripted("asker", script)]) as engine:
        run_id = await engine.submit("asker")
        (question,) = await engine.wait_waiting(run_id)
        with pytest.raises(Invalid, match="no call"):
            await engine.answer(question.interrupt_id, Answer.EDIT, args={"a": 1})
        await engine.answer(question.interrupt_id, Answer.APPROVE)
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
