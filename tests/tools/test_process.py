"""Tools in processes of their own: what they do ends with them (F10, F40)."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from perdure.engine.ports import ToolOutcome
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import ToolCallStatus
from perdure.testing import process_tools as zoo
from perdure.testing.tools import invocation_of, read_journal
from perdure.tools import LocalToolRunner, ToolRegistry, tool


@pytest.fixture
async def runner(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalToolRunner]:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    registry = ToolRegistry(zoo.PROCESS_TOOLS)
    async with LocalToolRunner(
        registry, grace_s=0.2, output_bytes_max=100_000, process_environment={"GIVEN": "1"}
    ) as runner:
        yield runner


async def wait_for(path: Path) -> str:
    with anyio.fail_after(30):
        while not path.exists() or not path.read_text(encoding="utf-8"):  # noqa: ASYNC110, ASYNC240 (a file written by another process)
            await anyio.sleep(0.01)
    return path.read_text(encoding="utf-8")  # noqa: ASYNC240 (a few bytes)


def code_of(outcome: ToolOutcome) -> FailureCode | None:
    return None if outcome.result.error is None else outcome.result.error.code


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_a_call_runs_in_a_reused_process_with_a_chosen_environment(
    runner: LocalToolRunner,
) -> None:
    invocation = invocation_of(zoo.process_echo.spec, {"value": [1, "é"]}, timeout_s=15)
    outcomes = [await runner.invoke(invocation) for _ in range(2)]
    outputs = [cast("dict[str, Any]", outcome.result.output) for outcome in outcomes]
    assert outputs[0]["value"] == [1, "é"]
    assert outputs[0]["key"] == "key-1"
    assert outputs[0]["pid"] == outputs[1]["pid"] != os.getpid()
    assert "GIVEN" in outputs[0]["environment"]
    assert "SECRET_TOKEN" not in outputs[0]["environment"]
    assert outcomes[1].artifacts[0].data == b"echo"


@tool(isolation="process")
def process_breaks(text: str) -> int:
    """Raise what nobody meant to."""
    return int(text)


async def test_what_a_tool_raises_there_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    """R-17.3."""
    async with LocalToolRunner(ToolRegistry([process_breaks])) as runner:
        await runner.invoke(invocation_of(process_breaks.spec, {"text": "no"}, timeout_s=15))
    (told,) = [one for one in caplog.records if one.name == "perdure.tools.runner"]
    assert told.getMessage().startswith("call of process_breaks raised ValueError")
    assert "at test_process.py:" in told.getMessage()


async def test_async_tools_run_there_too(runner: LocalToolRunner) -> None:
    invocation = invocation_of(zoo.process_echo_async.spec, {"value": 7}, timeout_s=15)
    assert (await runner.invoke(invocation)).result.output == 7


async def test_what_undoes_a_call_runs_in_a_process_too(
    runner: LocalToolRunner, tmp_path: Path
) -> None:
    """R-5.6, R-9.4: with what the call did, under a key of its own."""
    spec = zoo.process_pay_refundable.spec
    did: dict[str, object] = {
        "args": {"journal": str(tmp_path / "journal"), "amount": 5},
        "output": 5,
        "external_ref": None,
        "effect_key": "key-1",
        "status": "succeeded",
    }
    invocation = invocation_of(spec, did, timeout_s=15, effect_key="key-2")
    outcome = await runner.compensate(invocation)
    assert cast("dict[str, Any]", outcome.result.output)["refunded"] == 5
    assert read_journal(tmp_path / "journal") == [{"key": "key-2", "amount": -5}]
    none = await runner.compensate(invocation_of(zoo.process_pay.spec, did, timeout_s=15))
    assert code_of(none) is FailureCode.TOOL_NOT_FOUND


async def test_an_exit_after_the_start_is_an_unknown_outcome_for_a_side_effect(
    runner: LocalToolRunner, tmp_path: Path
) -> None:
    """F10, TIM-01: nobody knows whether it happened."""
    args = {"journal": str(tmp_path / "journal"), "amount": 5, "then": "exit"}
    outcome = await runner.invoke(invocation_of(zoo.process_pay.spec, args, timeout_s=15))
    assert outcome.result.status is ToolCallStatus.UNKNOWN
    assert outcome.result.error is not None
    assert "status 7" in outcome.result.error.reason
    assert len(read_journal(tmp_path / "journal")) == 1


async def test_an_exit_of_a_reading_tool_is_unavailable_and_the_next_call_works(
    runner: LocalToolRunner, tmp_path: Path
) -> None:
    """TIM-01: told at once, long before its time is over."""
    args = {"then": "exit", "started": str(tmp_path / "started")}
    outcome = await runner.invoke(invocation_of(zoo.process_read.spec, args, timeout_s=15))
    assert code_of(outcome) is FailureCode.TOOL_UNAVAILABLE
    args["then"] = "return"
    outcome = await runner.invoke(invocation_of(zoo.process_read.spec, args, timeout_s=15))
    assert outcome.result.output == "read"


@pytest.mark.slow
async def test_a_timeout_kills_the_whole_group(runner: LocalToolRunner, tmp_path: Path) -> None:
    # a first call, so that the timeout is not spent on starting the process
    """F40."""
    await runner.invoke(invocation_of(zoo.process_echo.spec, {"value": 1}, timeout_s=15))
    args = {"pids": str(tmp_path / "pids")}
    outcome = await runner.invoke(invocation_of(zoo.process_spawn.spec, args, timeout_s=2))
    assert outcome.result.status is ToolCallStatus.TIMED_OUT
    pids = json.loads((tmp_path / "pids").read_text(encoding="utf-8"))
    assert len(pids) == 2
    with anyio.fail_after(30):
        while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110 (init reaps the grandchild)
            await anyio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "status"), [("hang", ToolCallStatus.UNKNOWN), ("ignore", ToolCallStatus.UNKNOWN)]
)
async def test_a_cancelled_call_is_interrupted_and_then_killed(
    runner: LocalToolRunner, tmp_path: Path, then: str, status: ToolCallStatus
) -> None:
    journal, late = tmp_path / "journal", list[ToolOutcome]()
    args = {"journal": str(journal), "amount": 5, "then": then}
    invocation = invocation_of(zoo.process_pay.spec, args, timeout_s=15, on_late=late.append)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.invoke, invocation)
            await wait_for(journal)
            tasks.cancel_scope.cancel()
    assert [outcome.result.status for outcome in late] == [status]


@pytest.mark.slow
async def test_a_flood_of_output_and_too_large_a_result_hurt_nobody(
    runner: LocalToolRunner,
) -> None:
    flood = invocation_of(zoo.process_flood.spec, {"megabytes": 20}, timeout_s=15)
    assert (await runner.invoke(flood)).result.output == "printed"
    big = invocation_of(zoo.process_big.spec, {"size": 5_000_000}, timeout_s=15)
    assert code_of(await runner.invoke(big)) is FailureCode.TOOL_RESULT_INVALID


@pytest.mark.slow
async def test_what_cannot_be_imported_was_not_started() -> None:
    wrong = zoo.process_pay
    moved = type(wrong)(
        wrong.function,
        spec=wrong.spec.model_copy(update={"description": "another definition"}),
        inputs=cast("Any", None),
        output=None,
        lookup=None,
        compensate=None,
        isolation="process",
    )
    async with LocalToolRunner(ToolRegistry([moved])) as runner:
        args = {"journal": "", "amount": 1, "then": ""}
        outcome = await runner.invoke(invocation_of(moved.spec, args, timeout_s=15))
    assert code_of(outcome) is FailureCode.TOOL_UNAVAILABLE
    assert outcome.result.error is not None
    assert "another definition" in outcome.result.error.reason
