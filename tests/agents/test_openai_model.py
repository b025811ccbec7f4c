"""The OpenAI adapter with the real client against a server that speaks the wire format."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from perdure.agents.models.openai import OpenAIModel, Price
from perdure.agents.models.port import ChatCall, ChatMessage, ModelDelta, ModelReply, ModelRequest
from perdure.engine.ports import PlannerFailure
from perdure.protocol.failures import FailureCode
from perdure.protocol.tools import ToolSpec
from perdure.testing import openai_stub as stub

KEY = "sk-secret-0123456789abcdef"
HELLO = (ChatMessage(role="user", text="hello"),)
LOOK = ToolSpec(name="look", input_schema={"type": "object"})


@asynccontextmanager
async def model_at(
    *script: stub.Behaviour, **options: Any
) -> AsyncGenerator[tuple[OpenAIModel, stub.OpenAIStub]]:
    with anyio.fail_after(30):
        async with stub.openai_stub(*script) as server:
            model = OpenAIModel("m", api_key=KEY, base_url=server.base_url, **options)
            try:
                yield model, server
            finally:
                await model.aclose()


async def ask(behaviour: stub.Behaviour, **request: Any) -> ModelReply:
    async with model_at(behaviour) as (model, _):
        return await model.complete(ModelRequest(messages=HELLO, tools=(LOOK,), **request))


async def fail(behaviour: stub.Behaviour, **request: Any) -> PlannerFailure:
    with pytest.raises(PlannerFailure) as caught:
        await ask(behaviour, **request)
    return caught.value


async def test_a_reply_arrives_whole_with_usage_and_deltas_on_the_way() -> None:
    seen: list[ModelDelta] = []
    reply = await ask(stub.reply("good morning to you"), on_delta=seen.append)
    assert reply.text == "good morning to you"
    assert (reply.finish, reply.model, reply.session) == ("stop", "m", "chatcmpl-stub")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (11, 7)
    assert seen[0] == ModelDelta(session="chatcmpl-stub")
    assert "".join(delta.text for delta in seen) == reply.text


async def test_the_request_carries_messages_tools_and_limits_as_the_protocol_writes_them() -> None:
    call = ChatCall(call_id="c1", tool="look.up", arguments='{"n":1}')
    messages = (
        ChatMessage(role="system", text="be brief"),
        *HELLO,
        ChatMessage(role="assistant", calls=(call,)),
        ChatMessage(role="tool", call_id="c1", text="42"),
    )
    tools = (
        ToolSpec(name="look.up", description="d", input_schema={"type": "object"}),
        ToolSpec(name="look_up", input_schema={"type": "object"}),
    )
    async with model_at(stub.reply("ok")) as (model, server):
        await model.complete(
            ModelRequest(messages=messages, tools=tools, temperature=0.0, max_output_tokens=9)
        )
    body = server.requests[0]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("m", 0.0, 9)
    assert [message["role"] for message in body["messages"]] == [
        "system", "user", "assistant", "tool",
    ]  # fmt: skip
    names = [tool["function"]["name"] for tool in body["tools"]]
    assert names == ["look_up_2", "look_up"]
    assert body["messages"][2]["tool_calls"][0]["function"]["name"] == "look_up_2"
    assert body["messages"][3] == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert f"Bearer {KEY}" in server.heads[0]


async def test_a_dotted_tool_name_comes_back_as_it_is_ours() -> None:
    tool = ToolSpec(name="files.read", input_schema={"type": "object"})
    async with model_at(stub.call_tools(("files_read", "{}"))) as (model, _):
        reply = await model.complete(ModelRequest(messages=HELLO, tools=(tool,)))
    assert [call.tool for call in reply.calls] == ["files.read"]


async def test_cost_is_counted_by_the_price() -> None:
    price = Price(input_per_million=1_000_000, output_per_million=2_000_000)
    async with model_at(stub.reply("ok"), price=price) as (model, _):
        reply = await model.complete(ModelRequest(messages=HELLO))
    assert reply.usage.cost == 11 + 14


async def test_parallel_calls_keep_their_order_ids_and_arguments() -> None:
    reply = await ask(stub.call_tools(("look", '{"n": 1}'), ("look", '{"n": 2}')))
    assert [(call.call_id, call.args, call.problem) for call in reply.calls] == [
        ("call_0", {"n": 1}, None),
        ("call_1", {"n": 2}, None),
    ]


async def test_malformed_arguments_stay_text_with_the_problem() -> None:
    (call,) = (await ask(stub.malformed_call())).calls
    assert call.args == '{"n": 1, "text": "unend'
    assert call.problem is not None
    assert "not JSON" in call.problem


@pytest.mark.parametrize("arguments", ['"{}"', "[1]", "null", "NaN", "[" * 100_000])
async def test_arguments_that_are_no_object_are_told_as_a_problem(arguments: str) -> None:
    (call,) = (await ask(stub.call_tools(("look", arguments)))).calls
    assert call.args == arguments
    assert call.problem is not None


async def test_a_tool_that_was_not_offered_is_passed_on_for_the_engine_to_judge() -> None:
    (call,) = (await ask(stub.unknown_tool())).calls
    assert call.tool == "no_such_tool"


async def test_a_hundred_parallel_calls_arrive_and_more_than_the_limit_are_cut() -> None:
    hundred = await ask(stub.many_calls(100))
    assert [call.args for call in hundred.calls] == [{"n": n} for n in range(100)]
    assert len((await ask(stub.many_calls(200))).calls) == 128


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, "a", "look", '{"n": 1}'), (0, "b", "look", '{"n": 2}')],  # every call has index 0
        [(None, "a", "look", '{"n": 1}'), (None, "b", "look", '{"n": 2}')],  # no index at all
        [(None, None, "look", '{"n": 1}'), (None, None, "look", '{"n": 2}')],  # no id either
        [(7, "a", "look", '{"n": 1}'), (3, "b", "look", '{"n": 2}')],  # gaps, out of order
        [(0, "a", "look", '{"n"'), (0, "a", "look", ": 1}"), (1, "b", "look", '{"n": 2}')],
        [(0, "a", "look", '{"n": 1}'), (0, "a", "look", '{"n": 1}'), (1, "b", "look", '{"n": 2}')],
        [(0, "a", "look", '{"n": 1}'), (1, "a", "look", '{"n": 2}')],  # the same id twice
        [(0, "a", "look", '{"n"'), (1, "b", "look", '{"n": 2'), (0, "", "", ": 1}"),
         (1, None, None, "}")],
    ],
)  # fmt: skip
async def test_the_ways_servers_number_parallel_calls_all_give_two_calls(
    pieces: Sequence[tuple[int | None, str | None, str | None, str]],
) -> None:
    behaviour = stub.deltas([stub.call_delta(*piece) for piece in pieces], finish="tool_calls")
    calls = (await ask(behaviour)).calls
    assert [(call.tool, call.args) for call in calls] == [("look", {"n": 1}), ("look", {"n": 2})]
    ids = [call.call_id for call in calls if call.call_id is not None]
    assert len(ids) == len(set(ids))


async def test_a_piece_of_a_call_that_was_never_opened_is_an_error() -> None:
    behaviour = stub.deltas([stub.call_delta(4, None, None, '{"n": 1}')], finish="tool_calls")
    failure = (await fail(behaviour)).failure
    assert (failure.code, failure.retryable) == (FailureCode.MODEL_ERROR, True)


async def test_a_repeated_finish_and_usage_change_nothing() -> None:
    async def twice(exchange: stub.Exchange) -> None:
        await exchange.open()
        await exchange.send(stub.chunk({"content": "once"}))
        for _ in range(2):
            await exchange.send(stub.chunk(finish="stop"))
            await exchange.send(stub.usage_chunk())
        await exchange.done()

    reply = await ask(twice)
    assert (reply.text, reply.usage.input_tokens) == ("once", 11)


async def test_text_after_the_end_is_an_error() -> None:
    async def late(exchange: stub.Exchange) -> None:
        await exchange.open()
        await exchange.send(stub.chunk(finish="stop"))
        await exchange.send(stub.chunk({"content": "late"}))
        await exchange.done()

    assert (await fail(late)).failure.code is FailureCode.MODEL_ERROR


AWKWARD = "line\u2028sep\u2029par\u0085nel \r\n tail — 🦜 é 漢 data: [DONE]\n\ndata: x"


async def test_line_separators_crlf_and_split_characters_survive() -> None:
    reply = await ask(stub.awkward_text(AWKWARD))
    assert reply.text == AWKWARD
    assert reply.usage.output_tokens == 7


async def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    event = json.dumps(stub.chunk({"content": "a\ud800b"})).encode()
    finish = json.dumps(stub.chunk(finish="stop")).encode()
    reply = await ask(stub.raw(b"data: " + event + b"\n\ndata: " + finish + b"\n\n"))
    assert reply.text == "a\ufffdb"


@pytest.mark.parametrize("behaviour", [stub.stall(3), stub.trickle(3), stub.stall(0)])
async def test_silence_and_keep_alives_end_at_the_idle_limit(behaviour: stub.Behaviour) -> None:
    failure = (await fail(behaviour, idle_s=0.05)).failure
    assert (failure.code, failure.retryable) == (FailureCode.MODEL_TIMEOUT, True)
    assert failure.details == {"limit_ms": 50}


async def test_a_server_that_never_answers_ends_at_the_idle_limit() -> None:
    assert (await fail(stub.silent(), idle_s=0.05)).failure.code is FailureCode.MODEL_TIMEOUT


async def test_a_request_ends_at_its_whole_timeout_however_lively_the_stream_is() -> None:
    async def chatter(exchange: stub.Exchange) -> None:
        await exchange.open()
        while True:
            await exchange.send(stub.chunk({"content": "and "}))
            await anyio.sleep(0.002)

    failure = (await fail(chatter, idle_s=5, timeout_s=0.1)).failure
    assert failure.code is FailureCode.MODEL_TIMEOUT
    assert "0.1 s" in failure.reason


async def test_progress_starts_the_idle_time_again() -> None:
    async def slow(exchange: stub.Exchange) -> None:
        await exchange.open()
        for _ in range(8):
            await exchange.send(stub.chunk({"reasoning_content": "hm"}))
            await anyio.sleep(0.08)
        await exchange.send(stub.chunk({"content": "done"}))
        await exchange.send(stub.chunk(finish="stop"))
        await exchange.done()

    async with model_at(stub.reply("warm"), slow) as (model, _):
        await model.complete(ModelRequest(messages=HELLO))
        reply = await model.complete(ModelRequest(messages=HELLO, idle_s=0.5))
    assert reply.text == "done"


@pytest.mark.parametrize(
    "behaviour",
    [stub.cut(3), stub.cut(0), stub.no_finish("half an ans"), stub.raw(b""), stub.empty()],
)
async def test_a_stream_without_an_end_or_words_is_an_error_and_never_an_answer(
    behaviour: stub.Behaviour,
) -> None:
    failure = (await fail(behaviour)).failure
    assert (failure.code, failure.retryable) == (FailureCode.MODEL_ERROR, True)
    assert "half" not in failure.reason


@pytest.mark.parametrize(
    "data",
    [
        b"data: {not json}\n\n",
        b"data: \xff\xfe\n\n",
        b"event: ping\n\n",
        b"data: 5\n\n",
        b"data: [1]\n\n",
        b'data: {"choices": 5}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": [5], "content": 7}}]}\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
    ],
)
async def test_garbage_in_the_stream_is_an_error_that_may_pass(data: bytes) -> None:
    failure = (await fail(stub.raw(data))).failure
    assert (failure.code, failure.retryable) == (FailureCode.MODEL_ERROR, True)


async def test_a_finished_reply_needs_neither_usage_nor_end_marker() -> None:
    assert (await ask(stub.no_end_marker("whole"))).text == "whole"
    held = stub.no_end_marker("whole", hold=True)
    async with model_at(held, usage_grace_s=0.02) as (model, _):
        assert (await model.complete(ModelRequest(messages=HELLO))).text == "whole"


async def test_a_request_that_failed_after_it_began_is_recorded_as_used() -> None:
    (use,) = (await fail(stub.cut(3))).model_uses
    assert (use.model, use.finish, use.text, use.session) == ("m", "error", "", "chatcmpl-stub")


async def test_a_rate_limit_tells_how_long_to_wait_and_the_next_request_goes_through() -> None:
    async with model_at(stub.rate_limited("7"), stub.reply("ok")) as (model, server):
        with pytest.raises(PlannerFailure) as caught:
            await model.complete(ModelRequest(messages=HELLO))
        assert caught.value.retry_after_s == 7.0
        assert caught.value.failure.retryable
        assert len(server.requests) == 1
        assert (await model.complete(ModelRequest(messages=HELLO))).text == "ok"


async def test_retry_after_as_a_date_counts_from_the_answers_own_date() -> None:
    headers = {
        "Date": "Wed, 21 Oct 2026 07:28:00 GMT",
        "Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT",
    }
    assert (await fail(stub.status(503, headers=headers))).retry_after_s == 30.0


@pytest.mark.parametrize(
    ("code", "expected", "retryable"),
    [
        (500, FailureCode.MODEL_ERROR, True),
        (502, FailureCode.MODEL_ERROR, True),
        (529, FailureCode.MODEL_ERROR, True),
        (408, FailureCode.MODEL_TIMEOUT, True),
        (400, FailureCode.MODEL_ERROR, False),
        (401, FailureCode.MODEL_ERROR, False),
        (404, FailureCode.MODEL_ERROR, False),
        (302, FailureCode.MODEL_ERROR, False),
        (413, FailureCode.CONTEXT_OVERFLOW, False),
    ],
)
async def test_each_status_has_its_code(code: int, expected: FailureCode, retryable: bool) -> None:
    caught = await fail(stub.status(code, headers={"Location": "http://127.0.0.1:9/"}))
    assert (caught.failure.code, caught.failure.retryable) == (expected, retryable)


@pytest.mark.parametrize(
    "behaviour",
    [
        stub.overflow(),
        stub.status(400, {"message": "the prompt is too long: 9 tokens > 8"}),
        stub.error_in_stream({"message": "x", "code": "context_length_exceeded"}),
    ],
)
async def test_a_conversation_that_does_not_fit_is_told_as_overflow(
    behaviour: stub.Behaviour,
) -> None:
    failure = (await fail(behaviour)).failure
    assert (failure.code, failure.retryable) == (FailureCode.CONTEXT_OVERFLOW, False)


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        ({"message": "overloaded"}, True),
        ({"message": "busy", "code": 429}, True),
        ({"message": "bad", "code": 400}, False),
        ({"message": "bad", "type": "invalid_request_error"}, False),
    ],
)
async def test_an_error_within_the_stream_ends_the_request(
    error: dict[str, Any], retryable: bool
) -> None:
    failure = (await fail(stub.error_in_stream(error))).failure
    assert (failure.code, failure.retryable) == (FailureCode.MODEL_ERROR, retryable)


async def test_a_server_that_is_not_there_is_an_error_that_may_pass() -> None:
    model = OpenAIModel("m", api_key=KEY, base_url="http://user:pw-hidden@127.0.0.1:1/v1")
    with pytest.raises(PlannerFailure) as caught:
        await model.complete(ModelRequest(messages=HELLO))
    await model.aclose()
    assert caught.value.failure.retryable
    assert "pw-hidden" not in str(caught.value)


async def test_no_error_shows_the_key() -> None:
    message = f"Incorrect API key provided: {KEY} (Bearer {KEY}), see sk-other-12345678"
    caught = await fail(stub.status(401, {"message": message}))
    for text in (str(caught), repr(caught), caught.failure.model_dump_json()):
        assert "secret" not in text
        assert "sk-other" not in text
    assert caught.__cause__ is None
    assert caught.__suppress_context__
    assert KEY not in repr(OpenAIModel("m", api_key=KEY))


async def test_a_cancel_ends_the_request_at_once_though_the_server_goes_on() -> None:
    async with model_at(stub.stall(60)) as (model, server):
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(model.complete, ModelRequest(messages=HELLO))
                await server.arrived.wait()
                group.cancel_scope.cancel()
            await server.all_left.wait()


def test_a_model_without_any_key_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        OpenAIModel("m")
