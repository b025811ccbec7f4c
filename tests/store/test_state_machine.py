"""Random lifecycles on the memory store, SQLite and PostgreSQL at once: they agree on everything.

Each rule does one thing to all three stores with the same ids and the same clock, compares their
answers, and in the end every row that can be read (R-12.5, R-2.1; issue 3 asks for this machine).
"""

from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio.from_thread
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from perdure.protocol.codec import digest_bytes
from perdure.protocol.errors import PerdureError
from perdure.protocol.states import TERMINAL, CancelAction, RunState
from perdure.store.memory import MemoryDatabase
from perdure.store.ports import Database, Store
from perdure.store.postgres import PostgresDatabase
from perdure.store.reader import InterruptFilter, Reader
from perdure.store.requests import LeaseKey, NewBlob, RetentionRule
from perdure.store.sqlite import SqliteDatabase
from perdure.testing import builders as make
from perdure.testing.clock import START, FakeClock

PAGE = 10_000
WORKERS = ("worker-a", "worker-b")
KEEP = tuple(RetentionRule(state=state, older_than_s=60) for state in TERMINAL)

Work = Callable[[Database], Coroutine[Any, Any, object]]


class Trio:
    """The three stores, emptied for each example."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, dsn: Callable[[], str]) -> None:
        self._portal = portal
        self._dsn = dsn
        self.clock = FakeClock()
        self.databases: dict[str, Database] = {}

    def open(self) -> None:
        """Open three empty databases."""
        self._folder = TemporaryDirectory()
        self._stack = AsyncExitStack()
        dsn = self._dsn()
        self._portal.call(self._open, dsn)

    async def _open(self, dsn: str) -> None:
        path = Path(self._folder.name) / "perdure.db"
        made: dict[str, Any] = {
            "memory": MemoryDatabase(clock=self.clock),
            "sqlite": SqliteDatabase(path, clock=self.clock, synchronous="off"),
            "postgres": PostgresDatabase(dsn, clock=self.clock),
        }
        for name, database in made.items():
            self.databases[name] = await self._stack.enter_async_context(database)

    def close(self) -> None:
        """Close them."""
        self._portal.call(self._stack.aclose)
        self._folder.cleanup()

    def ask(self, work: Work) -> Any:
        """Do the same on each store; they must answer alike. An error of ours is an answer."""
        answers = {
            name: self._portal.call(_answer, work, db) for name, db in self.databases.items()
        }
        first = answers["memory"]
        assert all(answer == first for answer in answers.values()), answers
        return first

    def write(self, work: Callable[[Store], Coroutine[Any, Any, object]]) -> Any:
        """Do the same through each writing port."""
        return self.ask(lambda database: work(database.store))

    def read(self, work: Callable[[Reader], Coroutine[Any, Any, object]]) -> Any:
        """Read the same from each."""
        return self.ask(lambda database: work(database.reader))


async def _answer(work: Work, database: Database) -> object:
    try:
        return await work(database)
    except PerdureError as error:
        return type(error).__name__


_trio: list[Trio] = []


class Lifecycles(RuleBasedStateMachine):
    """What callers, workers, people and sweeps may do, in any order."""

    runs = Bundle("runs")
    threads = Bundle("threads")

    def __init__(self) -> None:
        super().__init__()
        self.trio = _trio[0]
        self.trio.open()
        self.clock = self.trio.clock
        self.known: list[str] = []
        self.threads_known: list[str] = []
        self.last: dict[str, Any] = {}

    def teardown(self) -> None:
        try:
            self._compare_all()
        finally:
            self.trio.close()

    # -- callers

    @initialize(target=runs)
    def first(self) -> str:
        return self._insert(make.new_run())

    @rule(
        target=runs,
        priority=st.integers(0, 2),
        key=st.sampled_from([None, None, "k1", "k2"]),
        fingerprint=st.sampled_from(["a", "b"]),
        run_s=st.sampled_from([None, 20.0]),
        strategy=st.sampled_from(["enqueue", "reject"]),
        place=st.integers(0, 3),
    )
    def insert(
        self,
        priority: int,
        key: str | None,
        fingerprint: str,
        run_s: float | None,
        strategy: str,
        place: int,
    ) -> str:
        thread = self.threads_known[place] if place < len(self.threads_known) else None
        new = make.new_run(
            thread_id=thread,
            key=key,
            fingerprint=fingerprint,
            priority=priority,
            run_s=run_s,
            strategy=strategy,
            max_attempts=2,
        )
        return self._insert(new) or self.known[-1]

    def _insert(self, new: Any) -> str:
        answer = self.trio.write(lambda store: store.insert_run(new))
        if isinstance(answer, str):
            return ""
        run_id: str = answer.row.facts.run_id
        if answer.created:
            self.known.append(run_id)
            self.threads_known.append(answer.row.facts.thread_id)
        return run_id if answer.created else ""

    @rule(run_id=runs, action=st.sampled_from(CancelAction))
    def cancel(self, run_id: str, action: CancelAction) -> None:
        self.trio.write(lambda store: store.request_cancel(run_id, make.cancel_wish(action)))

    # -- workers

    @rule(worker=st.sampled_from(WORKERS), limit=st.integers(1, 3))
    def claim(self, worker: str, limit: int) -> None:
        want = make.want(worker_id=worker, limit=limit)
        self.trio.write(lambda store: store.claim_runs(want))

    @rule(run_id=runs, text=st.sampled_from(["a", "b"]))
    def note(self, run_id: str, text: str) -> None:
        blob = NewBlob(
            digest=digest_bytes(text.encode()), media_type="text/plain", data=text.encode()
        )
        row = self._row(run_id)
        self._commit(replace(make.commit_of(row, make.note(text)), blobs=(blob,)))

    @rule(run_id=runs)
    def begin(self, run_id: str) -> None:
        row = self._row(run_id)
        if row.hot.state is RunState.PENDING:
            self._commit(make.commit_of(row, path=make.TO_EXECUTING))

    @rule(run_id=runs)
    def finish(self, run_id: str) -> None:
        row = self._row(run_id)
        paths = {
            RunState.PENDING: make.TO_SUCCEEDED,
            RunState.EXECUTING: (RunState.SUCCEEDED,),
        }
        if row.hot.state in paths and row.hot.open_interrupts == 0:
            self._commit(make.commit_of(row, path=paths[row.hot.state]))

    @rule(run_id=runs, delay_s=st.sampled_from([None, 0.0, 7.0]))
    def park(self, run_id: str, delay_s: float | None) -> None:
        row = self._row(run_id)
        if row.hot.lease_owner is not None:
            self._commit(make.parked(make.commit_of(row, make.note("park")), ready_in_s=delay_s))

    @rule(run_id=runs, expires_in_s=st.sampled_from([None, 5.0]))
    def ask(self, run_id: str, expires_in_s: float | None) -> None:
        row = self._row(run_id)
        if row.hot.state is RunState.PENDING and row.hot.lease_owner is not None:
            self._commit(make.asking(row, expires_in_s=expires_in_s))

    @rule(run_id=runs)
    def stale(self, run_id: str) -> None:
        """A writer with an old token, epoch or seq changes nothing."""
        row = self._row(run_id)
        commit = make.commit_of(row, make.note("stale"))
        guard = commit.guard
        wrong = (
            replace(guard, token=(guard.token or 0) + 1),
            replace(guard, epoch=guard.epoch + 1),
            replace(guard, expected_seq=guard.expected_seq - 1),
        )
        for bad in wrong:
            self.trio.write(lambda store, bad=bad: store.commit([replace(commit, guard=bad)]))

    @rule(run_id=runs)
    def send_again(self, run_id: str) -> None:
        """A commit whose answer was lost is sent again."""
        commit = self.last.get(run_id)
        if commit is not None:
            self.trio.write(lambda store: store.commit([commit]))

    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker: str) -> None:
        keys = self._leases(worker)
        self.trio.write(lambda store: store.renew_leases(worker, keys, make.TTL_S))

    @rule(worker=st.sampled_from(WORKERS))
    def release(self, worker: str) -> None:
        keys = self._leases(worker)
        self.trio.write(lambda store: store.release_runs(worker, keys))

    @rule(run_id=runs)
    def quarantine(self, run_id: str) -> None:
        row = self._row(run_id)
        token, step = row.hot.lease_token, row.hot.step_index
        self.trio.write(lambda store: store.quarantine(run_id, token, "odd", step))

    # -- people and sweeps

    @rule(run_id=runs)
    def answer(self, run_id: str) -> None:
        row = self._row(run_id)
        where = InterruptFilter(run_id=run_id)
        found = self.trio.read(
            lambda reader: reader.list_interrupts(
                row.facts.tenant_id, where, after=None, limit=PAGE
            )
        )
        if found:
            self._commit(make.answering(row, found[-1].interrupt_id))

    @rule(seconds=st.sampled_from([1.0, 10.0, 31.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def sweep(self) -> None:
        self.trio.write(lambda store: store.requeue_expired(10))
        self.clock.advance(make.BACKOFF_S)  # its jitter is over

    @rule()
    def retain(self) -> None:
        self.trio.write(lambda store: store.expire_history(KEEP, after=None, limit=PAGE))
        self.trio.write(lambda store: store.expire_blobs(0, after=None, limit=PAGE))

    @precondition(lambda self: bool(self.known))
    @invariant()
    def rows_agree(self) -> None:
        for run_id in self.known:
            self._row(run_id)

    # -- helpers

    def _row(self, run_id: str) -> Any:
        return self.trio.read(lambda reader: _row_of(reader, run_id))

    def _leases(self, worker: str) -> list[LeaseKey]:
        rows = [self._row(run_id) for run_id in self.known]
        return [
            LeaseKey(run_id=row.facts.run_id, token=row.hot.lease_token)
            for row in rows
            if row.hot.lease_owner == worker
        ]

    def _commit(self, commit: Any) -> None:
        self.last[commit.run_id] = commit
        self.trio.write(lambda store: store.commit([commit]))

    def _compare_all(self) -> None:
        for run_id in self.known:
            self.trio.read(lambda reader, run_id=run_id: _everything(reader, run_id))
        for thread_id in self.threads_known:
            self.trio.read(
                lambda reader, thread_id=thread_id: reader.list_messages(
                    thread_id, after=0, limit=PAGE
                )
            )
        self.trio.read(lambda reader: reader.backlog())


async def _row_of(reader: Reader, run_id: str) -> object:
    """Return a run's row; when a suspected run may be taken again is each store's own chance."""
    row = await reader.find_run(None, run_id)
    assert row is not None
    if row.hot.faults and row.hot.wake_at is not None:
        return replace(row, hot=replace(row.hot, wake_at=START))
    return row


async def _everything(reader: Reader, run_id: str) -> list[object]:
    row = await reader.find_run(None, run_id)
    assert row is not None
    where = InterruptFilter(run_id=run_id)
    events = await reader.events_after(run_id, 0, limit=PAGE)
    return [
        [
            (event.seq, event.type, event.at, event.attempt, event.epoch, event.raw)
            for event in events
        ],
        await reader.list_attempts(run_id),
        await reader.list_checkpoints(run_id, before=None, limit=PAGE),
        await reader.list_interrupts(row.facts.tenant_id, where, after=None, limit=PAGE),
        _sorted(await reader.timers_of(run_id)),
        await reader.is_ready(run_id),
        [await reader.read_blob(row.facts.tenant_id, digest_bytes(text)) for text in (b"a", b"b")],
    ]


def _sorted(rows: Sequence[object]) -> list[str]:
    return sorted(map(repr, rows))


@pytest.fixture
def trio(postgres_emptied: Callable[[], str]) -> Generator[Trio]:
    """The three stores, for the machine that hypothesis makes."""
    with anyio.from_thread.start_blocking_portal() as portal:
        opened = Trio(portal, postgres_emptied)
        _trio.append(opened)
        yield opened
        _trio.clear()


def _run(examples: int) -> None:
    run_state_machine_as_test(
        Lifecycles,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_stores_agree_on_random_lifecycles(trio: Trio) -> None:
    """R-2.1, R-2.2, R-12.5, R-9.3: answers, rows, logs, timers and content are the same."""
    del trio
    _run(6)


@pytest.mark.crash_full
@pytest.mark.timeout(1800)
def test_the_stores_agree_on_many_random_lifecycles(trio: Trio) -> None:
    """The same, much longer: part of `make crash`."""
    del trio
    _run(300)
