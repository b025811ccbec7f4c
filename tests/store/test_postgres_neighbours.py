"""One strange row, one locked row, one connection that is dead: it stops nobody else (decision 6)."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import anyio
import asyncpg
import pytest

from perdure.engine.committer import Committer
from perdure.ops.local_postgres import LocalPostgres
from perdure.protocol.errors import PerdureError, Unavailable
from perdure.protocol.ids import uuid_of
from perdure.signals.local import LocalSignals
from perdure.store.commits import Busy, Commit, CommitResult, Committed
from perdure.store.memory import MemoryDatabase
from perdure.store.ports import Store
from perdure.store.postgres import PostgresDatabase, admission, lanes
from perdure.store.postgres.admission import Admission
from perdure.store.postgres.driver import SETTINGS
from perdure.store.postgres.errors import Trouble, trouble_of
from perdure.store.postgres.lanes import Lane, keep_trying
from perdure.store.requests import Claimed, Inserted, NewRun
from perdure.testing import builders as make
from perdure.testing.embedded import core_of
from perdure.testing.proxy import flaky_proxy
from tests.store.test_postgres_faults import locked_row, run_sql, through

pytestmark = pytest.mark.timeout(60)

CLOSED = "postgresql://nobody@127.0.0.1:1/none"


# ---------------------------------------------------------------- errors of the database


@pytest.mark.parametrize(
    ("error", "tries_again"),
    [
        (asyncpg.InternalServerError, True),
        (asyncpg.IdleInTransactionSessionTimeoutError, True),
        (asyncpg.InvalidPasswordError, True),
        (asyncpg.InvalidCatalogNameError, True),
        (asyncpg.PostgresIOError, False),
        (asyncpg.InsufficientPrivilegeError, False),
        (asyncpg.UndefinedColumnError, False),
        (asyncpg.DataCorruptedError, False),
    ],
)
async def test_no_error_of_the_driver_passes_the_edge_of_the_store(
    error: type[asyncpg.PostgresError], *, tries_again: bool
) -> None:
    """`store/ports.py`: Unavailable, or StoreFull, and nothing else."""
    tries: list[int] = []

    async def once(failed: int) -> None:
        tries.append(failed)
        raise error("x")

    with pytest.raises(PerdureError) as told:
        await keep_trying(once, patience_s=0.01)
    assert told.value.code in {"unavailable", "store_full"}
    assert (len(tries) > 1) is tries_again


async def test_why_the_server_lets_nobody_in_is_told_while_it_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def once(failed: int) -> None:
        raise asyncpg.InvalidCatalogNameError('database "nodb" does not exist')

    with caplog.at_level(logging.INFO), pytest.raises(PerdureError):
        await keep_trying(once, patience_s=0.01)
    told = 'lost (database "nodb" does not exist): trying again for 0.01 s at most'
    assert [record.getMessage() for record in caplog.records] == [told]


async def test_a_statement_that_fails_for_one_run_fails_for_no_other(postgres_own_dsn: str) -> None:
    """A page that is damaged, a trigger that raises: the batch goes on, and the run waits."""
    async with PostgresDatabase(postgres_own_dsn) as database:
        bad, good = await make.claimed(database.store), await make.claimed(database.store)
        await run_sql(
            postgres_own_dsn,
            "CREATE FUNCTION damaged() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'page 7' USING ERRCODE = 'XX001'; END $$",
        )
        await run_sql(
            postgres_own_dsn,
            "CREATE TRIGGER damaged BEFORE INSERT ON events FOR EACH ROW WHEN (NEW.run_id ="
            f" '{uuid_of(bad.row.facts.run_id)}') EXECUTE FUNCTION damaged()",
        )
        results = await database.store.commit(
            [make.commit_of(bad.row, make.note()), make.commit_of(good.row, make.note())]
        )
        with pytest.raises(Unavailable):
            await database.store.commit([make.commit_of(bad.row, make.note())])
    assert [type(result) for result in results] == [Busy, Committed]


async def test_a_timer_of_an_unknown_kind_keeps_no_other_from_being_acted_upon(
    postgres_dsn: str,
) -> None:
    """R-20.4: it is left to the release that knows it, however long it is due."""
    async with PostgresDatabase(postgres_dsn) as database:
        new = make.new_run(run_s=0.000001)
        await database.store.insert_run(new)
        await run_sql(
            postgres_dsn,
            "INSERT INTO timers (run_id, ref, due_at, kind)"
            " SELECT run_id, run_id, '-infinity', 'newer' FROM runs",
        )
        due = await database.reader.due_timers(1)
    assert [(timer.run_id, timer.kind) for timer in due] == [(new.run_id, "deadline")]


class _FailsFor:
    """A store with a bug that one run's commits meet."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult | Busy]:
        if any(commit.run_id == self._run_id for commit in commits):
            raise ValueError("nobody thought of this")
        return await self._store.commit(commits)


async def test_a_bug_of_the_store_reaches_the_run_that_meets_it_and_no_other() -> None:
    """The committer lives on, and the others of the batch are written."""
    async with MemoryDatabase() as database, LocalSignals() as signals:
        held = [await make.claimed(database.store) for _ in range(3)]
        store = cast("Store", _FailsFor(database.store, held[1].row.facts.run_id))
        committer = Committer(replace(core_of(database, signals), store=store))
        results: list[CommitResult | Exception] = []

        async def send(one: Claimed) -> None:
            try:
                results.append(await committer.commit(make.commit_of(one.row, make.note())))
            except ValueError as error:
                results.append(error)

        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as sending:
                for one in held:
                    sending.start_soon(send, one)
                await anyio.wait_all_tasks_blocked()
                group.start_soon(committer.run)
            row = await make.look(database.reader, held[0].row.facts.run_id)
            assert isinstance(await committer.commit(make.commit_of(row, make.note())), Committed)
            group.cancel_scope.cancel()
    assert sorted(type(result).__name__ for result in results) == [
        "Committed",
        "Committed",
        "ValueError",
    ]


# ---------------------------------------------------------------- who keeps rows locked


async def test_a_process_that_was_paused_in_a_transaction_loses_its_rows(postgres_dsn: str) -> None:
    """Its run can be taken away before long, and it learns that its connection is gone."""
    assert SETTINGS["idle_in_transaction_session_timeout"] == "10s", "well below a lease"
    settings = {**SETTINGS, "idle_in_transaction_session_timeout": "100ms"}
    async with PostgresDatabase(postgres_dsn) as database:
        await database.store.insert_run(make.new_run())
        (held,) = await database.store.claim_runs(make.want(ttl_s=0.0))
        paused = await asyncpg.connect(postgres_dsn, server_settings=settings)
        await paused.execute("BEGIN")
        await paused.execute("SELECT 1 FROM run_state FOR UPDATE")
        assert await database.store.requeue_expired(10) == []
        with anyio.fail_after(10):
            while not (taken := await database.store.requeue_expired(10)):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)) as told:
            await paused.execute("SELECT 1")
    assert [one.run_id for one in taken] == [held.row.facts.run_id]
    assert trouble_of(told.value) is Trouble.LOST


async def test_a_commit_whose_child_enters_a_locked_thread_keeps_no_other_waiting(
    postgres_dsn: str,
) -> None:
    """Decision 6: it is Busy, and is written once the thread is free."""
    async with PostgresDatabase(postgres_dsn) as database:
        thread = make.new_thread()
        await database.store.create_thread(thread)
        parent, other = await make.claimed(database.store), await make.claimed(database.store)
        run_id = parent.row.facts.run_id
        child = replace(
            make.new_run(thread_id=thread.thread_id), parent_run_id=run_id, root_run_id=run_id
        )
        spawning = replace(make.commit_of(parent.row, make.note()), new_children=(child,))
        batch = [spawning, make.parked(make.commit_of(other.row, make.note()), ready_in_s=0.0)]
        async with locked_row(postgres_dsn, thread.thread_id, "threads"):
            with anyio.fail_after(4):
                results = await database.store.commit(batch)
        assert [type(result) for result in results] == [Busy, Committed]
        await make.write(database.store, spawning)
        assert await database.reader.find_run(None, child.run_id) is not None


async def test_a_locked_row_keeps_only_its_own_run_from_a_release(postgres_dsn: str) -> None:
    async with PostgresDatabase(postgres_dsn) as database:
        busy, free = await make.claimed(database.store), await make.claimed(database.store)
        leases = [make.lease_of(busy), make.lease_of(free)]
        async with locked_row(postgres_dsn, busy.row.facts.run_id):
            with anyio.fail_after(4):
                assert await database.store.release_runs(make.WORKER, leases) == 1
        assert await database.reader.is_ready(free.row.facts.run_id)


async def test_a_run_for_a_locked_thread_keeps_no_other_from_being_inserted(
    postgres_dsn: str,
) -> None:
    """It comes in as soon as the thread is free."""
    async with PostgresDatabase(postgres_dsn) as database:
        thread = make.new_thread()
        await database.store.create_thread(thread)
        queued = make.new_run(thread_id=thread.thread_id)
        async with (
            anyio.create_task_group() as group,
            locked_row(postgres_dsn, thread.thread_id, "threads"),
        ):
            group.start_soon(database.store.insert_run, queued)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(4):
                for _ in range(5):
                    assert (await database.store.insert_run(make.new_run())).created
            assert await database.reader.find_run(None, queued.run_id) is None
        assert await database.reader.find_run(None, queued.run_id) is not None


# ---------------------------------------------------------------- dead connections


async def test_a_connection_that_answers_no_more_is_given_up(
    postgres: LocalPostgres, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F12: reads, sweeps and claims end as unavailable, and the pool has its room back."""
    monkeypatch.setattr(lanes, "PATIENCE_S", 0.1)
    async with flaky_proxy(postgres.port) as proxy:
        dsn = through(proxy, postgres_dsn)
        async with PostgresDatabase(dsn, pool_max=1) as database:
            new = make.new_run()
            await database.store.insert_run(new)
            monkeypatch.setattr(lanes, "SILENCE_S", 0.2)
            proxy.delay_s = 60.0
            with anyio.fail_after(5):
                with pytest.raises(Unavailable):
                    await database.reader.find_run(None, new.run_id)
                with pytest.raises(Unavailable):
                    await database.store.claim_runs(make.want())
                with pytest.raises(Unavailable):
                    await database.store.requeue_expired(10)
                proxy.delay_s = 0.0
                monkeypatch.setattr(lanes, "SILENCE_S", 5.0)
                monkeypatch.setattr(lanes, "PATIENCE_S", 5.0)
                assert len(await database.store.claim_runs(make.want())) == 1


async def _sent(inserts: Admission, new: NewRun, errors: list[Exception]) -> Inserted | None:
    try:
        return await inserts.insert_run(new)
    except PerdureError as error:
        errors.append(error)
        return None


async def test_an_outage_is_told_to_all_who_insert_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "PATIENCE_S", 1.0)
    monkeypatch.setattr(admission, "WAITING_MAX", 7)
    inserts, errors = Admission(Lane(CLOSED, shared=True), None), list[Exception]()
    started = time.monotonic()
    async with anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(_sent, inserts, make.new_run(), errors)
    assert time.monotonic() - started < 5.0, "the patience of one call, not of nine"
    assert [type(error) for error in errors] == [Unavailable] * 9
    assert "too many" in str(errors[0])


async def test_a_caller_that_is_cancelled_leaves_soon_and_takes_no_other_with_it(
    postgres: LocalPostgres, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other call, which waited for this one's answer, is sent again."""
    monkeypatch.setattr(admission, "GRACE_S", 0.05)
    async with (
        flaky_proxy(postgres.port) as proxy,
        PostgresDatabase(through(proxy, postgres_dsn)) as database,
    ):
        await database.store.insert_run(make.new_run())
        proxy.delay_s = 60.0
        waiting = make.new_run()
        async with anyio.create_task_group() as group:
            leaving = anyio.CancelScope()

            async def leave() -> None:
                with leaving:
                    await database.store.insert_run(make.new_run())

            group.start_soon(leave)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(database.store.insert_run, waiting)
            await anyio.wait_all_tasks_blocked()
            proxy.delay_s = 0.0
            leaving.cancel()
            group.cancel_scope.deadline = anyio.current_time() + 5
        assert await database.reader.find_run(None, waiting.run_id) is not None
