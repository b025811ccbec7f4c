"""What a commit writes beside the run: steps, calls, interrupts, messages, content."""

from dataclasses import replace

import pytest

from perdure.protocol import ids
from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.messages import Role
from perdure.protocol.records import ToolCallRow
from perdure.protocol.states import (
    ArtifactStatus,
    InterruptKind,
    InterruptStatus,
    OnExpiry,
    StepStatus,
    ToolCallStatus,
)
from perdure.store.commits import (
    CallUpdate,
    Commit,
    Committed,
    ExecutionEnd,
    InterruptClose,
    NewArtifact,
    NewCheckpoint,
    NewExecution,
    NewInterrupt,
    NewMessage,
    Refused,
    StepChange,
)
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import NewBlob
from perdure.testing.builders import (
    EXECUTING,
    FAILED,
    TO_EXECUTING,
    TO_WAITING,
    action_of,
    advanced,
    answering,
    asking,
    claimed,
    commit_of,
    look,
    new_call,
    new_id,
    new_run,
    note,
    parked,
    result_of,
    with_call,
    write,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract


def begun(commit: Commit, call: ToolCallRow, number: int = 1) -> Commit:
    """Return the commit with an execution of the call begun."""
    new = NewExecution(
        tool_call_id=call.tool_call_id, number=number, args_digest=call.effective_digest
    )
    return replace(commit, new_executions=(*commit.new_executions, new))


def ended(commit: Commit, call: ToolCallRow, number: int = 1) -> Commit:
    """Return the commit, which holds the call's result first, with its execution ended."""
    status = ToolCallStatus.SUCCEEDED
    end = ExecutionEnd(tool_call_id=call.tool_call_id, number=number, outcome=status)
    seq = commit.guard.expected_seq + 1
    update = CallUpdate(tool_call_id=call.tool_call_id, status=status, result_seq=seq)
    return replace(commit, execution_ends=(end,), call_updates=(update,))


class RowContract(Contract):
    """Steps, calls, executions, checkpoints, interrupts, messages, artifacts and blobs."""

    async def test_a_step_is_opened_moved_and_ended(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        begin = StepChange(index=0, status=StepStatus.RUNNING, first_seq=3)
        row = await advanced(store, reader, replace(commit_of(held.row, note()), steps=(begin,)))
        started = clock()
        [step] = await reader.list_steps(run_id, after=-1, limit=10)
        assert (step.index, step.status, step.first_seq) == (0, StepStatus.RUNNING, 3)
        assert (step.last_seq, step.started_at, step.ended_at) == (None, started, None)
        clock.advance(5)
        end = StepChange(index=0, status=StepStatus.SUCCEEDED, first_seq=3, last_seq=4)
        following = StepChange(index=1, status=StepStatus.PENDING, first_seq=4)
        commit = replace(commit_of(row, note()), steps=(end, following))
        await write(store, commit)
        one, two = await reader.list_steps(run_id, after=-1, limit=10)
        assert (one.status, one.first_seq, one.last_seq) == (StepStatus.SUCCEEDED, 3, 4)
        assert (one.started_at, one.ended_at) == (started, clock())
        assert (two.index, two.status, two.started_at) == (1, StepStatus.PENDING, clock())

    async def test_a_call_is_kept_as_given_and_updated_where_told(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        assert await reader.list_tool_calls(call.run_id, after=None, limit=10) == [call]
        update = CallUpdate(
            tool_call_id=call.tool_call_id,
            status=ToolCallStatus.PENDING,
            effective_digest="f" * 64,
            external_ref="ref-1",
        )
        row = await advanced(store, reader, replace(commit_of(row), call_updates=(update,)))
        expected = replace(
            call,
            status=ToolCallStatus.PENDING,
            effective_digest="f" * 64,
            external_ref="ref-1",
        )
        assert await reader.find_tool_call("default", call.tool_call_id) == expected
        done = CallUpdate(
            tool_call_id=call.tool_call_id, status=ToolCallStatus.SUCCEEDED, result_seq=6
        )
        commit = replace(commit_of(row, result_of(call)), call_updates=(done,))
        await write(store, commit)
        expected = replace(expected, status=ToolCallStatus.SUCCEEDED, result_seq=6)
        assert await reader.find_tool_call("default", call.tool_call_id) == expected

    async def test_a_call_may_be_decided_and_begun_in_one_commit(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        call = new_call(held.row, action_seq=3)
        commit = begun(commit_of(held.row, action_of(call), path=TO_EXECUTING), call)
        row = await advanced(store, reader, replace(commit, new_calls=(call,)))
        [execution] = await reader.list_executions(call.run_id)
        assert (execution.tool_call_id, execution.number) == (call.tool_call_id, 1)
        assert (execution.run_id, execution.attempt) == (call.run_id, 1)
        assert execution.args_digest == call.args_digest
        assert (execution.started_at, execution.ended_at) == (clock(), None)
        assert execution.outcome is None
        assert await reader.open_executions(call.run_id) == [execution]
        clock.advance(2)
        await write(store, ended(commit_of(row, result_of(call)), call))
        [execution] = await reader.list_executions(call.run_id)
        assert (execution.outcome, execution.ended_at) == (ToolCallStatus.SUCCEEDED, clock())
        assert await reader.open_executions(call.run_id) == []

    async def test_a_checkpoint_is_kept_as_given(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        new = NewCheckpoint(
            seq=3,
            parent_seq=None,
            step_index=2,
            agent_state={"memo": ["a", 1]},
            digest="a" * 64,
        )
        await write(store, replace(commit_of(held.row, note()), checkpoint=new))
        found = await reader.find_checkpoint("default", held.row.facts.run_id, new.seq)
        assert found is not None
        assert (found.run_id, found.seq, found.parent_seq) == (held.row.facts.run_id, 3, None)
        assert (found.step_index, found.attempt, found.epoch) == (2, 1, 0)
        assert (found.agent_state, found.digest) == (new.agent_state, new.digest)
        assert (found.schema_version, found.created_at) == (SCHEMA_VERSION, clock())

    async def test_an_interrupt_is_opened_and_answered(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        new = NewInterrupt(
            interrupt_id=new_id(ids.INTERRUPT),
            kind=InterruptKind.APPROVAL,
            opened_seq=3,
            key="send",
            tool_call_id=new_id(ids.TOOL_CALL),
            args_digest="a" * 64,
            definition_digest="b" * 64,
            expires_in_s=60.0,
            on_expiry=OnExpiry.DENY,
        )
        commit = parked(commit_of(held.row, note(), path=TO_WAITING))
        row = await advanced(store, reader, replace(commit, new_interrupts=(new,)))
        opened = await reader.find_interrupt("default", new.interrupt_id)
        assert opened is not None
        assert opened.expires_at is not None
        assert (opened.expires_at - clock()).total_seconds() == 60.0
        assert (opened.kind, opened.status) == (InterruptKind.APPROVAL, InterruptStatus.PENDING)
        assert (opened.run_id, opened.tenant_id, opened.key) == (
            row.facts.run_id,
            "default",
            "send",
        )
        assert (opened.tool_call_id, opened.args_digest) == (new.tool_call_id, "a" * 64)
        assert (opened.definition_digest, opened.on_expiry) == ("b" * 64, OnExpiry.DENY)
        assert (opened.opened_seq, opened.created_at) == (3, clock())
        assert (opened.closed_seq, opened.answer, opened.consumed_by) == (None, None, None)
        clock.advance(5)
        close = InterruptClose(
            interrupt_id=new.interrupt_id,
            status=InterruptStatus.ANSWERED,
            closed_seq=row.hot.last_seq + 1,
            answer="edit",
            answer_digest="c" * 64,
            answered_by="ana",
            effective_digest="d" * 64,
        )
        commit = commit_of(row, note(), path=(EXECUTING,))
        await write(store, replace(commit, interrupt_closes=(close,), ready_in_s=0.0))
        assert await reader.find_interrupt("default", new.interrupt_id) == replace(
            opened,
            status=InterruptStatus.ANSWERED,
            closed_seq=close.closed_seq,
            args_digest="d" * 64,
            answer="edit",
            answer_digest="c" * 64,
            answered_by="ana",
            answered_at=clock(),
        )
        assert await reader.timers_of(row.facts.run_id) == []

    @pytest.mark.parametrize("status", [InterruptStatus.EXPIRED, InterruptStatus.CANCELLED])
    async def test_an_interrupt_that_nobody_answered_has_no_answer_time(
        self, store: Store, reader: Reader, status: InterruptStatus
    ) -> None:
        held = await claimed(store)
        asked = asking(held.row, expires_in_s=5.0)
        row = await advanced(store, reader, asked)
        interrupt_id = asked.new_interrupts[0].interrupt_id
        close = InterruptClose(
            interrupt_id=interrupt_id, status=status, closed_seq=row.hot.last_seq + 1
        )
        closing = commit_of(row, note(), path=(FAILED,))
        await write(store, replace(closing, interrupt_closes=(close,)))
        found = await reader.find_interrupt(None, interrupt_id)
        assert found is not None
        assert (found.status, found.answered_at, found.answer) == (status, None, None)
        assert found.closed_seq == close.closed_seq

    async def test_an_execution_spends_its_approval(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        asked = asking(row, path=())
        row = await advanced(store, reader, replace(asked, attempt_end=None))
        approval_id = asked.new_interrupts[0].interrupt_id
        begin = NewExecution(
            tool_call_id=call.tool_call_id,
            number=1,
            args_digest=call.args_digest,
            approval_id=approval_id,
        )
        await write(store, replace(commit_of(row), new_executions=(begin,)))
        found = await reader.find_interrupt("default", approval_id)
        assert found is not None
        assert found.consumed_by == 1

    async def test_an_approval_is_spent_once(self, store: Store, reader: Reader) -> None:
        """R-8.4: a second execution under it is refused with its whole commit."""
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        asked = asking(row, path=())
        row = await advanced(store, reader, replace(asked, attempt_end=None))
        first = NewExecution(
            tool_call_id=call.tool_call_id,
            number=1,
            args_digest=call.args_digest,
            approval_id=asked.new_interrupts[0].interrupt_id,
        )
        row = await advanced(store, reader, replace(commit_of(row), new_executions=(first,)))
        again = replace(commit_of(row), new_executions=(replace(first, number=2),))
        refused = Refused(reason="no such approval, or it is spent")
        assert await store.commit([again]) == [refused]
        found = await reader.find_interrupt("default", asked.new_interrupts[0].interrupt_id)
        assert found is not None
        assert found.consumed_by == 1
        assert await look(reader, row.facts.run_id) == row

    async def test_a_question_is_answered_once(self, store: Store, reader: Reader) -> None:
        """R-8.3: a second answer is refused, with its whole commit and in the same words."""
        held = await claimed(store)
        asked = asking(held.row)
        question = asked.new_interrupts[0].interrupt_id
        row = await advanced(store, reader, asked)
        other = await claimed(store, new_run())
        row = await advanced(store, reader, answering(row, question))
        again = [answering(row, question), commit_of(other.row, note())]
        refused, written = await store.commit(again)
        assert refused == Refused(reason="the interrupt is not pending")
        assert isinstance(written, Committed)
        assert await look(reader, row.facts.run_id) == row

    async def test_messages_take_the_next_places_of_the_thread(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        facts = held.row.facts
        clock.advance(1)
        new = tuple(
            NewMessage(
                message_id=new_id(ids.MESSAGE), seq=seq, role=Role.ASSISTANT, author="helper"
            )
            for seq in (3, 4)
        )
        await write(store, replace(commit_of(held.row, note(), note()), messages=new))
        found = await reader.list_messages(facts.thread_id, after=1, limit=10)
        assert [message.message_id for message in found] == [one.message_id for one in new]
        assert [message.position for message in found] == [2, 3]
        assert [message.seq for message in found] == [3, 4]
        assert {(m.run_id, m.tenant_id, m.body) for m in found} == {
            (facts.run_id, facts.tenant_id, None)
        }
        assert {(m.role, m.author, m.created_at) for m in found} == {
            (Role.ASSISTANT, "helper", clock())
        }
        thread = await reader.find_thread(facts.tenant_id, facts.thread_id)
        assert thread is not None
        assert (thread.last_position, thread.updated_at) == (3, clock())

    async def test_an_artifact_is_kept_with_its_content(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-15.7."""
        held = await claimed(store)
        facts = held.row.facts
        blob = NewBlob(digest="9" * 64, media_type="text/csv", data=b"a,b\n1,2\n")
        new = NewArtifact(
            artifact_id=new_id(ids.ARTIFACT),
            name="table.csv",
            version=2,
            media_type=blob.media_type,
            digest=blob.digest,
            size=len(blob.data),
            status=ArtifactStatus.FINAL,
            step_index=1,
            tool_call_id=None,
            seq=3,
        )
        await write(store, replace(commit_of(held.row, note()), artifacts=(new,), blobs=(blob,)))
        found = await reader.find_artifact("default", new.artifact_id)
        assert found is not None
        assert (found.run_id, found.thread_id, found.tenant_id) == (
            facts.run_id,
            facts.thread_id,
            facts.tenant_id,
        )
        assert (found.name, found.version, found.media_type) == ("table.csv", 2, "text/csv")
        assert (found.digest, found.size, found.status) == (blob.digest, 8, ArtifactStatus.FINAL)
        assert (found.step_index, found.tool_call_id, found.seq) == (1, None, 3)
        assert found.created_at == clock()
        assert await reader.read_blob("default", blob.digest) == blob.data

    async def test_content_is_kept_once_and_never_changed(
        self, store: Store, reader: Reader
    ) -> None:
        """R-5.9."""
        held = await claimed(store)
        first = NewBlob(digest="8" * 64, media_type="text/plain", data=b"first")
        row = await advanced(store, reader, replace(commit_of(held.row), blobs=(first, first)))
        other = replace(first, data=b"other")
        await write(store, replace(commit_of(row, note()), blobs=(other,)))
        assert await reader.read_blob("default", first.digest) == b"first"
