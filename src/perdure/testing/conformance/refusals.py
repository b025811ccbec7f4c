"""What a store does with rows it cannot keep: the one commit is refused, the others are written."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from perdure.protocol import ids
from perdure.protocol.codec import digest
from perdure.protocol.messages import Role
from perdure.protocol.records import ToolCallRow
from perdure.protocol.states import ArtifactStatus, InterruptKind
from perdure.store.commits import (
    Commit,
    Committed,
    NewArtifact,
    NewCheckpoint,
    NewExecution,
    NewInterrupt,
    NewMessage,
    Refused,
)
from perdure.store.ports import Store
from perdure.store.reader import InterruptFilter, Reader
from perdure.store.requests import NewBlob
from perdure.testing.builders import (
    advanced,
    claimed,
    commit_of,
    look,
    new_id,
    new_run,
    note,
    with_call,
    write,
)
from perdure.testing.conformance.base import Contract, history


@dataclass(frozen=True)
class Rows:
    """One row of each kind, all of one commit."""

    call: ToolCallRow
    execution: NewExecution
    checkpoint: NewCheckpoint
    interrupt: NewInterrupt
    message: NewMessage
    artifact: NewArtifact

    def on(self, commit: Commit) -> Commit:
        """Return the commit with all rows but the call."""
        return replace(
            commit,
            new_executions=(self.execution,),
            checkpoint=self.checkpoint,
            new_interrupts=(self.interrupt,),
            messages=(self.message,),
            artifacts=(self.artifact,),
        )


def rows_of(call: ToolCallRow, seq: int) -> Rows:
    """Return rows that the event at `seq` brings."""
    return Rows(
        call=call,
        execution=NewExecution(
            tool_call_id=call.tool_call_id, number=1, args_digest=call.args_digest
        ),
        checkpoint=NewCheckpoint(
            seq=seq,
            parent_seq=None,
            step_index=0,
            agent_state=None,
            digest=digest(None),
        ),
        interrupt=NewInterrupt(
            interrupt_id=new_id(ids.INTERRUPT),
            kind=InterruptKind.INPUT,
            opened_seq=seq,
            key="the-key",
        ),
        message=NewMessage(
            message_id=new_id(ids.MESSAGE), seq=seq, role=Role.ASSISTANT, author="helper"
        ),
        artifact=NewArtifact(
            artifact_id=new_id(ids.ARTIFACT),
            name="report",
            version=1,
            media_type="text/plain",
            digest="7" * 64,
            size=1,
            status=ArtifactStatus.DRAFT,
            step_index=0,
            tool_call_id=call.tool_call_id,
            seq=seq,
        ),
    )


TAKEN: dict[str, Callable[[Commit, Rows], Commit]] = {
    "a tool call": lambda commit, rows: replace(commit, new_calls=(rows.call,)),
    "an execution": lambda commit, rows: replace(commit, new_executions=(rows.execution,)),
    "a checkpoint": lambda commit, rows: replace(commit, checkpoint=rows.checkpoint),
    "an interrupt": lambda commit, rows: replace(
        commit, new_interrupts=(replace(rows.interrupt, key=None),)
    ),
    "an interrupt's key": lambda commit, rows: replace(
        commit,
        new_interrupts=(replace(rows.interrupt, interrupt_id=new_id(ids.INTERRUPT)),),
    ),
    "a message": lambda commit, rows: replace(commit, messages=(rows.message,)),
    "an artifact": lambda commit, rows: replace(commit, artifacts=(rows.artifact,)),
}


class RefusalContract(Contract):
    """Rows whose key is taken."""

    @pytest.mark.parametrize("name", list(TAKEN))
    async def test_what_is_taken_is_refused_alone_and_nothing_of_it_is_written(
        self, store: Store, reader: Reader, name: str
    ) -> None:
        held = await claimed(store)
        other = await claimed(store, new_run())
        row, call = await with_call(store, reader, held.row)
        rows = rows_of(call, row.hot.last_seq + 1)
        row = await advanced(store, reader, rows.on(commit_of(row, note())))
        blob = NewBlob(digest="6" * 64, media_type="text/plain", data=b"never")
        bad = TAKEN[name](replace(commit_of(row, note()), blobs=(blob,)), rows)
        refused, written = await store.commit([bad, commit_of(other.row, note())])
        assert isinstance(refused, Refused)
        assert refused.reason
        assert isinstance(written, Committed)
        assert await look(reader, row.facts.run_id) == row
        assert len(await history(reader, row.facts.run_id)) == row.hot.last_seq
        assert len(await history(reader, other.row.facts.run_id)) == written.seq
        assert await reader.read_blob("default", blob.digest) is None
        await write(store, commit_of(row, note()))

    async def test_an_interrupts_key_is_free_in_another_run(
        self, store: Store, reader: Reader
    ) -> None:
        for _ in range(2):
            held = await claimed(store)
            _, call = await with_call(store, reader, held.row)
            row = await look(reader, call.run_id)
            new = rows_of(call, row.hot.last_seq + 1).interrupt
            await write(store, replace(commit_of(row, note()), new_interrupts=(new,)))
        found = await reader.list_interrupts("default", InterruptFilter(), after=None, limit=10)
        assert [row.key for row in found] == ["the-key", "the-key"]
