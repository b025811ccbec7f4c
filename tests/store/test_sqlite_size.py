"""What a run costs in bytes of a SQLite file: about three times what it says, not thirty."""

from dataclasses import replace
from pathlib import Path

import anyio

from perdure.protocol.codec import digest
from perdure.protocol.events import StepEvent
from perdure.protocol.log import NewEvent
from perdure.protocol.runs import RunRow
from perdure.protocol.states import RunState, StepStatus, ToolCallStatus
from perdure.store.commits import (
    CallUpdate,
    Commit,
    ExecutionEnd,
    NewCheckpoint,
    NewExecution,
    StepChange,
)
from perdure.store.sqlite import SqliteDatabase
from perdure.testing.builders import (
    action_of,
    advanced,
    claimed,
    commit_of,
    new_call,
    note,
    result_of,
)

STEPS, RUNS, RUN_BYTES_MAX = 10, 20, 36_000


async def test_a_run_of_ten_steps_stays_under_its_size(tmp_path: Path) -> None:
    path = anyio.Path(tmp_path / "perdure.db")
    async with SqliteDatabase(Path(path), synchronous="off"):
        pass
    empty = (await path.stat()).st_size
    async with SqliteDatabase(Path(path), synchronous="off") as database:
        for _ in range(RUNS):
            row = (await claimed(database.store)).row
            for index in range(STEPS):
                row = await take_step(database, row, index)
    assert ((await path.stat()).st_size - empty) / RUNS < RUN_BYTES_MAX


async def take_step(database: SqliteDatabase, row: RunRow, index: int) -> RunRow:
    """Write a step of two commits: 200 bytes of arguments, a result of 1 KB."""
    start, last = row.hot.last_seq, index == STEPS - 1
    call = new_call(row, action_seq=start + 2, step_index=index)
    first_path = (RunState.PLANNING,) * (index == 0) + (RunState.EXECUTING,)
    first = with_checkpoint(
        commit_of(row, note("model", "x" * 60), action_of(call, "x" * 200), path=first_path), index
    )
    first = replace(
        first,
        steps=(StepChange(index=index, status=StepStatus.RUNNING, first_seq=start + 1),),
        new_calls=(call,),
        new_executions=(
            NewExecution(tool_call_id=call.tool_call_id, number=1, args_digest=call.args_digest),
        ),
    )
    row = await advanced(database.store, database.reader, first)
    done = NewEvent(data=StepEvent(index=index), step_index=index)
    path = (RunState.SUCCEEDED,) if last else (RunState.PLANNING,)
    second = with_checkpoint(commit_of(row, result_of(call, "x" * 1024), done, path=path), index)
    status, end = ToolCallStatus.SUCCEEDED, row.hot.last_seq + 2
    second = replace(
        second,
        steps=(
            StepChange(index=index, status=StepStatus.SUCCEEDED, first_seq=start + 1, last_seq=end),
        ),
        call_updates=(
            CallUpdate(tool_call_id=call.tool_call_id, status=status, result_seq=end - 1),
        ),
        execution_ends=(ExecutionEnd(tool_call_id=call.tool_call_id, number=1, outcome=status),),
    )
    return await advanced(database.store, database.reader, second)


def with_checkpoint(commit: Commit, index: int) -> Commit:
    """Return the commit with a checkpoint at its last event."""
    checkpoint = NewCheckpoint(
        seq=commit.guard.expected_seq + len(commit.events),
        parent_seq=None,
        step_index=index,
        agent_state={"mode": "plan"},
        digest=digest(index),
    )
    return replace(commit, checkpoint=checkpoint)
