"""What retention promises: whose history goes, what stays, and that used content is never lost."""

from dataclasses import replace

import pytest

from perdure.protocol import ids
from perdure.protocol.codec import digest_bytes
from perdure.protocol.errors import Gone
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import ArtifactStatus, RunState
from perdure.store.commits import NewArtifact
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import LateKept, NewBlob, RetentionRule
from perdure.testing.builders import (
    claimed,
    commit_of,
    finish,
    late_result,
    look,
    new_id,
    new_run,
    note,
    with_call,
    write,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract

DAY_S = 86_400.0
KEEP_A_DAY = (RetentionRule(state=RunState.SUCCEEDED, older_than_s=DAY_S),)


def blob(text: str) -> NewBlob:
    """Return content."""
    data = text.encode()
    return NewBlob(digest=digest_bytes(data), media_type="text/plain", data=data)


def product(content: NewBlob, *, seq: int, name: str) -> NewArtifact:
    """Return an artifact of some content."""
    return NewArtifact(
        artifact_id=new_id(ids.ARTIFACT),
        name=name,
        version=1,
        media_type=content.media_type,
        digest=content.digest,
        size=len(content.data),
        status=ArtifactStatus.FINAL,
        step_index=0,
        tool_call_id=None,
        seq=seq,
    )


class RetentionContract(Contract):
    """`expire_history` and `expire_blobs`."""

    async def test_the_history_of_an_ended_run_goes_after_its_time(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        run_id = row.facts.run_id
        ended = await finish(store, reader, run_id)
        clock.advance(DAY_S - 1)
        assert (await store.expire_history(KEEP_A_DAY, after=None, limit=10)).runs == 0
        clock.advance(1)
        assert (await store.expire_history(KEEP_A_DAY, after=None, limit=10)).runs == 1
        terminal = ended.hot.terminal_seq
        assert terminal is not None
        kept = await look(reader, run_id)
        assert kept.hot == replace(ended.hot, retained_from_seq=terminal, checkpoint_seq=None)
        events = await reader.events_after(run_id, 0, limit=100)
        assert [event.seq for event in events] == list(range(terminal, ended.hot.last_seq + 1))
        assert await reader.list_checkpoints(run_id, before=None, limit=10) == []
        calls = await reader.list_tool_calls(run_id, after=None, limit=10)
        assert [item.tool_call_id for item in calls] == [call.tool_call_id]
        assert len(await reader.list_attempts(run_id)) == 1
        assert (await store.expire_history(KEEP_A_DAY, after=None, limit=10)).runs == 0

    async def test_running_runs_and_other_states_keep_their_history(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        ended = await claimed(store)
        await finish(store, reader, ended.row.facts.run_id)
        clock.advance(2 * DAY_S)
        failed = (RetentionRule(state=RunState.FAILED, older_than_s=0),)
        assert (await store.expire_history(failed, after=None, limit=10)).runs == 0
        every = tuple(RetentionRule(state=state, older_than_s=0) for state in RunState)
        assert (await store.expire_history(every, after=None, limit=10)).runs == 1
        assert len(await reader.events_after(held.row.facts.run_id, 0, limit=10)) == 2

    async def test_a_tenants_own_rule_goes_before_the_general_one(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        mine = await claimed(store, new_run(tenant_id="mine"))
        other = await claimed(store, new_run(tenant_id="other"))
        for held in (mine, other):
            await finish(store, reader, held.row.facts.run_id)
        clock.advance(2 * DAY_S)
        own = RetentionRule(state=RunState.SUCCEEDED, older_than_s=None, tenant_id="mine")
        assert (await store.expire_history((*KEEP_A_DAY, own), after=None, limit=10)).runs == 1
        assert (await look(reader, mine.row.facts.run_id)).hot.retained_from_seq == 1

    async def test_a_sweep_goes_on_where_the_last_page_ended(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        for _ in range(3):
            held = await claimed(store)
            await finish(store, reader, held.row.facts.run_id)
        clock.advance(2 * DAY_S)
        first = await store.expire_history(KEEP_A_DAY, after=None, limit=2)
        assert first.runs == 2
        assert first.after is not None
        second = await store.expire_history(KEEP_A_DAY, after=first.after, limit=2)
        assert (second.runs, second.after) == (1, None)

    async def test_a_late_result_after_the_history_went_has_the_next_seq(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        ended = await finish(store, reader, row.facts.run_id)
        clock.advance(DAY_S)
        await store.expire_history(KEEP_A_DAY, after=None, limit=10)
        assert await store.record_late(late_result(call)) is LateKept.RECORDED
        events = await reader.events_after(row.facts.run_id, ended.hot.last_seq, limit=10)
        assert [(event.seq, event.type) for event in events] == [(ended.hot.last_seq + 1, "late")]

    async def test_content_goes_once_no_run_uses_it(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        first, second = await claimed(store), await claimed(store)
        shared, own = blob("shared"), blob("own")
        for held, blobs in ((first, (shared, own)), (second, (shared,))):
            commit = replace(commit_of(held.row, note()), blobs=blobs)
            await write(store, commit)
        tenant = first.row.facts.tenant_id
        await finish(store, reader, first.row.facts.run_id)
        clock.advance(DAY_S)
        assert (await store.expire_blobs(0, after=None, limit=10)).deleted == 0
        assert (await store.expire_history(KEEP_A_DAY, after=None, limit=10)).runs == 1
        assert (await store.expire_blobs(2 * DAY_S, after=None, limit=10)).deleted == 0
        assert (await store.expire_blobs(DAY_S - 1, after=None, limit=10)).deleted == 1
        assert await reader.read_blob(tenant, own.digest) is None
        assert await reader.read_blob(tenant, shared.digest) == shared.data

    async def test_content_is_looked_at_a_page_at_a_time(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-6.8: however much is in use, a transaction looks at no more than its page."""
        held, other = await claimed(store), await claimed(store)
        used = tuple(blob(f"used {number}") for number in range(4))
        idle = tuple(blob(f"idle {number}") for number in range(3))
        await write(store, replace(commit_of(held.row, note()), blobs=used))
        await write(store, replace(commit_of(other.row, note()), blobs=idle))
        await finish(store, reader, other.row.facts.run_id)
        clock.advance(DAY_S)
        await store.expire_history(KEEP_A_DAY, after=None, limit=10)
        pages, place, deleted = 0, None, 0
        while pages == 0 or place is not None:
            swept = await store.expire_blobs(0, after=place, limit=2)
            pages, place, deleted = pages + 1, swept.after, deleted + swept.deleted
            assert swept.deleted <= 2
        assert (pages, deleted) == (4, 3)
        tenant = held.row.facts.tenant_id
        for one in used:
            assert await reader.read_blob(tenant, one.digest) == one.data

    async def test_discarded_content_goes_once_no_run_uses_it(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-9.7: the rows stay, adopted ones as they are; what else the run uses stays too."""
        first, second = await claimed(store), await claimed(store)
        shared, own, kept = blob("shared"), blob("own"), blob("kept")
        for held, blobs in ((first, (shared, own, kept)), (second, (shared,))):
            made = tuple(
                product(one, seq=held.row.hot.last_seq + 1, name=f"file-{number}")
                for number, one in enumerate(blobs)
            )
            commit = replace(commit_of(held.row, note()), blobs=blobs, artifacts=made)
            await write(store, commit)
        row = await look(reader, first.row.facts.run_id)
        run_id, tenant = row.facts.run_id, row.facts.tenant_id
        late = replace(product(own, seq=row.hot.last_seq + 1, name="last"))
        ending = commit_of(row, path=[RunState.PLANNING, RunState.FAILED])
        ending = replace(ending, hot=replace(ending.hot, code=FailureCode.RUN_CANCELLED))
        discards = frozenset({shared.digest, own.digest})
        await write(store, replace(ending, artifacts=(late,), blobs=(own,), discards=discards))
        found = await reader.list_artifacts(
            tenant, run_id=run_id, thread_id=None, after=None, limit=10
        )
        assert {item.status for item in found} == {ArtifactStatus.DISCARDED}
        assert len(found) == 4
        [other] = await reader.list_artifacts(
            tenant, run_id=second.row.facts.run_id, thread_id=None, after=None, limit=10
        )
        assert other.status is ArtifactStatus.FINAL
        clock.advance(DAY_S)
        assert (await store.expire_blobs(0, after=None, limit=10)).deleted == 1
        assert await reader.read_blob(tenant, own.digest) is None
        for one in (shared, kept):
            assert await reader.read_blob(tenant, one.digest) == one.data

    async def test_a_shared_history_stays_as_long_as_those_who_share_it(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-10.3, R-6.8: first the run that shares it, then the shared one."""
        origin = await claimed(store)
        run_id = origin.row.facts.run_id
        await finish(store, reader, run_id)
        sharing = replace(new_run(), origin_run_id=run_id, origin_seq=2)
        await store.insert_run(sharing)
        clock.advance(2 * DAY_S)
        assert (await store.expire_history(KEEP_A_DAY, after=None, limit=10)).runs == 0
        await finish(store, reader, sharing.run_id)
        clock.advance(2 * DAY_S)
        assert (await store.expire_history(KEEP_A_DAY, after=None, limit=10)).runs == 1
        assert (await look(reader, sharing.run_id)).hot.retained_from_seq > 1
        assert (await store.expire_history(KEEP_A_DAY, after=None, limit=10)).runs == 1
        with pytest.raises(Gone):
            await store.insert_run(replace(new_run(), origin_run_id=run_id, origin_seq=2))

    async def test_input_and_answer_outlive_the_history(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        asked, answered = blob("input"), blob("answer")
        held = await claimed(store, replace(new_run(), blobs=(asked,)))
        row = await look(reader, held.row.facts.run_id)
        await finish(store, reader, row.facts.run_id, blobs=(answered,))
        clock.advance(2 * DAY_S)
        assert (await store.expire_history(KEEP_A_DAY, after=None, limit=10)).runs == 1
        assert (await store.expire_blobs(0, after=None, limit=10)).deleted == 0
        for content in (asked, answered):
            found = await reader.read_blob(row.facts.tenant_id, content.digest)
            assert found == content.data
