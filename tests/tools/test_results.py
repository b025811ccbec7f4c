"""What an execution comes to: values, errors, limits (UNI, TOO, F35-F41)."""

import json
import linecache
from datetime import date

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.engine.ports import ToolOutcome
from perdure.protocol.codec import DEPTH_MAX, clean, encode
from perdure.protocol.errors import Invalid
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import ToolCallStatus
from perdure.testing.tools import ToolZoo, invocation_of
from perdure.tools import LocalToolRunner, ToolContext, ToolRegistry, tool
from perdure.tools.results import REASON_CHARACTERS_MAX


async def run(zoo: ToolZoo, name: str, **args: object) -> ToolOutcome:
    async with LocalToolRunner(zoo.registry, output_bytes_max=1000) as runner:
        with anyio.fail_after(30):
            return await runner.invoke(zoo.invocation(name, clean(args)))


@pytest.mark.parametrize("name", ["echo", "echo_sync", "echo_inline"])
@pytest.mark.parametrize("value", [None, [], "x", {"a": [1, 2.5, True]}, "a\u2028b\ufeff"])
async def test_a_plain_value_succeeds_wherever_it_runs(
    zoo: ToolZoo, name: str, value: object
) -> None:
    outcome = await run(zoo, name, value=value)
    assert outcome.result.status is ToolCallStatus.SUCCEEDED
    assert outcome.result.output == value
    assert outcome.result.error is None


async def test_artifacts_and_the_external_reference_come_with_the_result(zoo: ToolZoo) -> None:
    """R-5.6."""
    outcome = await run(zoo, "draw", text="a cat")
    assert [(made.name, made.data) for made in outcome.artifacts] == [("drawing.txt", b"a cat")]
    assert outcome.result.external_ref == "drawing-7"


async def test_partial_and_pending_results_say_so(zoo: ToolZoo) -> None:
    """R-5.5."""
    half = (await run(zoo, "half_done")).result
    assert half.status is ToolCallStatus.PARTIAL
    assert (half.done, half.not_done) == ("3 of 5 mails", "2 of 5 mails")
    later = (await run(zoo, "answers_later")).result
    assert (later.status, later.external_ref) == (ToolCallStatus.PENDING, "job-1")


async def test_numbers_that_json_does_not_have_are_tagged(zoo: ToolZoo) -> None:
    """F38."""
    result = (await run(zoo, "nan")).result
    assert result.output == ["NaN", "Infinity", -0.0, str(2**60)]


async def test_half_an_emoji_is_replaced_and_nul_is_kept(zoo: ToolZoo) -> None:
    result = (await run(zoo, "surrogate")).result
    assert result.output == {"half": "\ufffd", "nul": "a\x00b"}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("returns_bytes", {}),
        ("too_deep", {"depth": DEPTH_MAX + 1}),
        ("too_deep", {"depth": 50_000}),
        ("big", {"size": 1001}),
        ("breaks_its_schema", {}),
    ],
)
async def test_a_result_that_cannot_be_used_fails_for_good(
    zoo: ToolZoo, name: str, args: dict[str, object]
) -> None:
    """R-5.8."""
    result = (await run(zoo, name, **args)).result
    assert result.status is ToolCallStatus.FAILED
    assert result.error is not None
    assert result.error.code is FailureCode.TOOL_RESULT_INVALID
    assert not result.error.retryable
    assert result.output is None


@pytest.mark.parametrize(
    ("what", "text", "code", "reason"),
    [
        ("ValueError", "bad", FailureCode.TOOL_ERROR, "ValueError: bad"),
        ("Exception", "", FailureCode.TOOL_ERROR, "Exception"),
        ("UnprintableError", "x", FailureCode.TOOL_ERROR, "UnprintableError"),
        ("SystemExit", "3", FailureCode.TOOL_ERROR, "SystemExit: 3"),
        ("KeyboardInterrupt", "", FailureCode.TOOL_ERROR, "KeyboardInterrupt"),
        ("ToolError", "no such order", FailureCode.TOOL_ERROR, "no such order"),
        ("ToolUnavailable", "down", FailureCode.TOOL_UNAVAILABLE, "ToolUnavailable: down"),
    ],
)
async def test_whatever_a_tool_raises_is_one_error_with_code_and_type(
    zoo: ToolZoo, what: str, text: str, code: FailureCode, reason: str
) -> None:
    """F41, R-5.4, R-5.8."""
    error = (await run(zoo, "raises", what=what, text=text)).result.error
    assert error is not None
    assert (error.code, error.reason) == (code, reason)
    assert error.retryable is (code is FailureCode.TOOL_UNAVAILABLE)
    assert error.details["type"] == what


async def test_what_nobody_meant_to_raise_is_logged_with_its_trace_and_no_arguments(
    zoo: ToolZoo, caplog: pytest.LogCaptureFixture
) -> None:
    """R-17.3: with its run and call; what a tool raises to say something is no news."""

    @tool
    def breaks(secret: str) -> int:
        return {"": 1}[secret[:0] + "key"]

    registry = ToolRegistry([breaks])
    async with LocalToolRunner(registry) as runner:
        await runner.invoke(invocation_of(breaks.spec, {"secret": "hunter2"}))
    for what in ("ToolError", "ToolUnavailable"):
        await run(zoo, "raises", what=what, text="said")
    (told,) = [one for one in caplog.records if one.name == "perdure.tools.jobs"]
    context = invocation_of(breaks.spec)
    said = f"call of breaks raised KeyError, run {context.run_id}, call {context.tool_call_id}"
    assert told.getMessage() == said
    assert told.levelname == "WARNING"
    assert "in breaks" in caplog.text
    assert "hunter2" not in caplog.text
    await run(zoo, "raises", what="UnprintableError", text="x")
    assert "raised UnprintableError" in caplog.text


async def test_a_huge_message_is_capped(zoo: ToolZoo) -> None:
    error = (await run(zoo, "raises", what="ValueError", text="\ud83d" + "y" * 10_000)).result.error
    assert error is not None
    assert len(error.reason) <= REASON_CHARACTERS_MAX


async def test_a_tool_that_cancels_itself_has_failed(zoo: ToolZoo) -> None:
    result = (await run(zoo, "cancels_itself")).result
    assert result.status is ToolCallStatus.FAILED
    assert result.error is not None
    assert result.error.details == {"type": "CancelledError"}


async def test_exception_groups_are_flattened(zoo: ToolZoo) -> None:
    error = (await run(zoo, "raises_group")).result.error
    assert error is not None
    assert error.reason == "3 errors: ValueError: a; KeyError: 'b'; ToolError: c"


async def test_a_group_of_one_counts_as_that_one() -> None:
    @tool
    async def one() -> None:
        async with anyio.create_task_group():
            raise ValueError("a")

    async with LocalToolRunner(ToolRegistry([one])) as runner:
        error = (await runner.invoke(invocation_of(one.spec))).result.error
    assert error is not None
    assert error.reason == "ValueError: a"


async def test_an_exit_in_a_task_of_the_tools_own_leaves_the_user_loop_alive(
    zoo: ToolZoo,
) -> None:
    async with LocalToolRunner(zoo.registry) as runner:
        error = (await runner.invoke(zoo.invocation("exits_in_a_task"))).result.error
        assert error is not None
        assert error.reason == "SystemExit: 3"
        outcome = await runner.invoke(zoo.invocation("echo", {"value": 1}))
    assert outcome.result.output == 1


async def test_a_tool_changes_only_its_own_copy_of_the_arguments(zoo: ToolZoo) -> None:
    invocation = zoo.invocation("changes_its_arguments", {"items": [1, 2]})
    async with LocalToolRunner(zoo.registry) as runner:
        await runner.invoke(invocation)
    assert invocation.args == {"items": [1, 2]}


async def test_values_of_other_types_are_converted_only_by_a_declared_type() -> None:
    @tool
    def undeclared() -> object:
        return date(2026, 1, 2)

    async with LocalToolRunner(ToolRegistry([undeclared])) as runner:
        error = (await runner.invoke(invocation_of(undeclared.spec))).result.error
    assert error is not None
    assert "date is not JSON" in error.reason


async def test_artifacts_over_the_limits_are_an_error_and_none_come_after_the_end() -> None:
    kept: list[ToolContext] = []

    @tool
    def greedy(context: ToolContext) -> None:
        kept.append(context)
        for _ in range(51):
            context.artifact("a", "b", "text/plain")

    async with LocalToolRunner(ToolRegistry([greedy])) as runner:
        outcome = await runner.invoke(invocation_of(greedy.spec))
    assert outcome.result.status is ToolCallStatus.FAILED
    assert len(outcome.artifacts) == 50
    with pytest.raises(RuntimeError):
        kept[0].artifact("late", b"", "text/plain")


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\\b", "a\nb", "a\0b", "a\u202eb", "x" * 201])
async def test_an_artifact_has_the_name_of_a_file_without_a_folder(name: str) -> None:
    @tool
    def makes(context: ToolContext) -> None:
        context.artifact(name, "b", "text/plain")

    async with LocalToolRunner(ToolRegistry([makes])) as runner:
        outcome = await runner.invoke(invocation_of(makes.spec))
    assert outcome.result.status is ToolCallStatus.FAILED
    assert outcome.artifacts == ()


async def test_an_unknown_tool_is_not_found(zoo: ToolZoo) -> None:
    invocation = zoo.invocation("echo")
    async with LocalToolRunner(ToolRegistry()) as runner:
        error = (await runner.invoke(invocation)).result.error
    assert error is not None
    assert error.code is FailureCode.TOOL_NOT_FOUND


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.dates()
    | st.complex_numbers()
)
KEYS = st.text(st.characters(codec=None)) | st.integers() | st.none()
NESTED = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.frozensets(st.integers() | st.text())
    ),
)


@given(NESTED)
def test_any_value_becomes_strict_json_or_is_refused(value: object) -> None:
    try:
        cleaned = clean(value)
    except Invalid:
        return
    text = encode(cleaned).decode("utf-8")
    again = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert again == cleaned
    assert clean(again) == cleaned


async def test_an_error_tells_the_line_of_the_tool_and_no_folder_of_this_machine() -> None:
    """The innermost line of the author's own code, also when a library raised below it."""

    @tool
    def reads(text: str) -> object:
        return json.loads(text)

    async with LocalToolRunner(ToolRegistry([reads])) as runner:
        error = (await runner.invoke(invocation_of(reads.spec, {"text": "{"}))).result.error
    assert error is not None
    file, _, line = str(error.details["at"]).partition(":")
    code = linecache.getline(__file__, int(line)).strip()
    assert (file, code) == ("test_results.py", "return json.loads(text)")
