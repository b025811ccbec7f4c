"""The conversation models read: legal for strict providers, and incremental without a trace."""

from collections.abc import Container, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from perdure.agents.loop import conversation
from perdure.agents.loop.conversation import Conversations
from perdure.agents.loop.render import render_turn
from perdure.agents.models.port import ChatMessage
from perdure.engine.context import AskRecord, CallRecord, Turn
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.messages import (
    DataPart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from perdure.protocol.states import ToolCallStatus
from tests.agents.contexts import AT, context_of, facts_of, illegalities

FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])

text = st.text('ab é漢\u2028\n"\\{', max_size=6)
json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=2,
)
failures = st.builds(
    Failure,
    code=st.sampled_from(FailureCode),
    reason=text,
    retryable=st.booleans(),
    details=st.dictionaries(text, json_values, max_size=2),
)
calls = st.builds(
    CallRecord,
    tool_call_id=st.just(""),
    planner_call_id=st.sampled_from([None, "", "call_0", "call_1"]),
    tool=st.sampled_from(["look", "write"]),
    args=json_values,
    status=st.sampled_from(ToolCallStatus),
    output=json_values,
    error=st.none() | failures,
    external_ref=st.none() | text,
    done=st.none() | text,
    not_done=st.none() | text,
)
asks = st.builds(
    AskRecord,
    interrupt_id=st.just(""),
    key=st.none(),
    title=text,
    outcome=st.sampled_from([None, "answered", "expired"]),
    value=json_values,
)


def numbered(step: int, turn: Turn) -> Turn:
    return replace(
        turn,
        step_index=step,
        calls=[
            replace(call, tool_call_id=f"tc_{step}_{index}")
            for index, call in enumerate(turn.calls)
        ],
        asks=[
            replace(ask, interrupt_id=f"int_{step}_{index}") for index, ask in enumerate(turn.asks)
        ],
    )


histories = st.lists(
    st.builds(
        Turn,
        step_index=st.just(0),
        text=text,
        calls=st.lists(calls, max_size=2),
        asks=st.lists(asks, max_size=1),
        notes=st.lists(failures, max_size=1),
    ),
    max_size=4,
).map(lambda turns: [numbered(index, turn) for index, turn in enumerate(turns)])


def unfinished(turn: Turn) -> Turn:
    """Return a turn as it looked before its results, answers and notes came."""
    return Turn(
        step_index=turn.step_index,
        text=turn.text,
        calls=[
            CallRecord(
                tool_call_id=call.tool_call_id,
                planner_call_id=call.planner_call_id,
                tool=call.tool,
                args=call.args,
                status=ToolCallStatus.RUNNING,
            )
            for call in turn.calls
        ],
    )


@given(histories, json_values)
@FEW
def test_every_history_makes_a_legal_conversation(turns: list[Turn], given: JsonValue) -> None:
    view = Conversations().view(context_of(turns, input=given), "be brief")
    assert illegalities(view.messages) == []


@given(histories)
@FEW
def test_a_conversation_grown_step_by_step_equals_one_made_from_nothing(
    turns: list[Turn],
) -> None:
    grown = Conversations()
    seen: list[Turn] = []
    for turn in turns:
        grown.view(context_of(seen), "be brief")
        seen.append(unfinished(turn))
        grown.view(context_of(seen), "be brief")
        seen[-1] = turn
        view = grown.view(context_of(seen), "be brief")
        assert view == Conversations().view(context_of(seen), "be brief")


def test_a_history_that_differs_from_what_was_kept_is_made_afresh() -> None:
    used = Conversations()
    used.view(context_of(turns_upto(5)))
    shorter = context_of(turns_upto(2))
    assert used.view(shorter) == Conversations().view(shorter)
    used.view(context_of(turns_upto(5)))
    turns = turns_upto(5)
    turns[3].text = "something else"
    assert used.view(context_of(turns)) == Conversations().view(context_of(turns))
    other = context_of(turns_upto(5), input="another task")
    assert used.view(other) == Conversations().view(other)
    assert used.view(other, "be kind") == Conversations().view(other, "be kind")


@given(st.lists(st.integers(0, 4), max_size=20))
@FEW
def test_forgetting_conversations_changes_none_of_them(order: list[int]) -> None:
    small = Conversations(conversations_max=2, characters_max=2000)
    lengths = [0] * 5
    for run in order:
        lengths[run] += 1
        turns = [
            Turn(step_index=index, text=f"said {run}.{index}") for index in range(lengths[run])
        ]
        context = context_of(turns, facts=facts_of(f"run_{run}"))
        assert small.view(context) == Conversations().view(context)
        assert len(small) <= 2


def turns_upto(count: int) -> list[Turn]:
    return [finished_turn(index) for index in range(count)]


def finished_turn(index: int) -> Turn:
    call = CallRecord(
        tool_call_id=f"tc_{index:032x}",
        planner_call_id=f"call_{index}",
        tool="look",
        args={"n": index},
        status=ToolCallStatus.SUCCEEDED,
        output={"found": index},
    )
    return Turn(step_index=index, text="looking", calls=[call])


def test_each_step_renders_only_what_it_has_not_seen() -> None:
    conversations = Conversations()
    turns: list[Turn] = []
    identities: dict[int, ChatMessage] = {}
    for index in range(200):
        turns.append(finished_turn(index))
        messages = conversations.view(context_of(turns)).messages
        for position, message in enumerate(messages[:-2]):
            assert identities.setdefault(position, message) is message


def test_a_thousand_steps_render_a_constant_number_of_turns_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendered = 0

    def counting(turn: Turn, used_ids: Container[str]) -> list[ChatMessage]:
        nonlocal rendered
        rendered += 1
        return render_turn(turn, used_ids)

    monkeypatch.setattr(conversation, "render_turn", counting)
    conversations = Conversations()
    turns: list[Turn] = []
    for index in range(1000):
        turns.append(finished_turn(index))
        conversations.view(context_of(turns))
    assert rendered <= 3 * 1000


def test_a_tool_error_reaches_the_model_as_data() -> None:
    turn = finished_turn(0)
    turn.calls[0].status = ToolCallStatus.FAILED
    turn.calls[0].output = None
    turn.calls[0].error = Failure(
        code=FailureCode.TOOL_ERROR, reason="no such row", details={"row": 7}
    )
    result = Conversations().view(context_of([turn])).messages[-1]
    assert result.role == "tool"
    assert result.text == (
        '{"status":"failed","error":{"code":"TOOL_ERROR","reason":"no such row",'
        '"details":{"row":7}}}'
    )


def test_a_partial_result_says_what_was_done_and_what_was_not() -> None:
    turn = finished_turn(0)
    turn.calls[0] = replace(
        turn.calls[0],
        status=ToolCallStatus.PARTIAL,
        output=None,
        done="3 mails",
        not_done="2 mails",
        external_ref="batch-9",
    )
    text = Conversations().view(context_of([turn])).messages[-1].text
    assert text == (
        '{"status":"partial","done":"3 mails","not_done":"2 mails","external_ref":"batch-9"}'
    )


def test_malformed_arguments_are_shown_back_as_the_text_they_were() -> None:
    turn = finished_turn(0)
    turn.calls[0].args = '{"n": 1, "unend'
    (call,) = Conversations().view(context_of([turn])).messages[-2].calls
    assert call.arguments == '{"not_json":"{\\"n\\": 1, \\"unend"}'


def test_a_question_and_its_answer_are_a_call_with_a_result() -> None:
    ask = AskRecord(
        interrupt_id="int_1",
        key="k",
        title="Which region?",
        outcome="answered",
        answer="respond",
        value="west",
        by="ada",
    )
    turn = Turn(step_index=0, text="I must know", asks=[ask])
    said, answer = Conversations().view(context_of([turn])).messages[-2:]
    assert said.calls[0].tool == "ask_human"
    assert said.calls[0].arguments == '{"question":"Which region?"}'
    assert answer.text == '{"outcome":"answered","answer":"respond","value":"west","by":"ada"}'


def test_notes_of_the_runtime_are_told_in_their_turn() -> None:
    note = Failure(code=FailureCode.OUTPUT_INVALID, reason="not an object")
    turn = Turn(step_index=0, text="done", notes=[note])
    said, told = Conversations().view(context_of([turn])).messages[-2:]
    assert (said.role, said.text, told.role) == ("assistant", "done", "user")
    assert "OUTPUT_INVALID" in told.text


def message_of(role: Role, parts: Sequence[Part], position: int) -> Message:
    return Message(
        message_id=f"msg_{position}",
        thread_id="thr_1",
        tenant_id="default",
        position=position,
        run_id=None,
        role=role,
        author="x",
        parts=list(parts),
        created_at=AT,
    )


def test_earlier_messages_of_the_thread_come_first_and_old_calls_are_told_as_text() -> None:
    messages = [
        message_of(Role.USER, [TextPart(text="hello"), DataPart(data={"n": 1})], 1),
        message_of(Role.ASSISTANT, [ToolCallPart(tool_call_id="c", tool="look", args={})], 2),
        message_of(Role.TOOL, [ToolResultPart(tool_call_id="c", status="succeeded", output=4)], 3),
        message_of(Role.ASSISTANT, [], 4),
        message_of(Role.SYSTEM, [TextPart(text="mind the gap")], 5),
    ]
    view = Conversations().view(context_of(messages=messages, input={"q": 1}), "be brief")
    assert [(message.role, message.text) for message in view.messages] == [
        ("system", "be brief"),
        ("user", 'hello\n{"n":1}'),
        ("assistant", "[called look: {}]"),
        ("user", "[result, succeeded: 4]"),
        ("user", "[system] mind the gap"),
        ("user", '{"q":1}'),
    ]
    assert illegalities(view.messages) == []


def test_a_tail_is_part_of_the_digest_but_not_of_the_conversation() -> None:
    conversations = Conversations()
    context = context_of(turns_upto(3))
    tail = ChatMessage(role="user", text="only now")
    with_tail = conversations.view(context, "", tail)
    without = conversations.view(context)
    assert with_tail.messages == (*without.messages, tail)
    assert with_tail.digest != without.digest
    assert Conversations().view(context).digest == without.digest
