"""What goes wrong around PostgreSQL: lost answers, killed backends, restarts, changed schemas."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.to_thread
import asyncpg
import pytest

from perdure.engine.committer import Committer
from perdure.ops.local_postgres import LocalPostgres, StopMode
from perdure.protocol.errors import Unavailable
from perdure.protocol.ids import uuid_of
from perdure.protocol.runs import RunRow
from perdure.signals.local import LocalSignals
from perdure.store.commits import Busy, CancelRequested, Commit, CommitResult, Committed
from perdure.store.postgres import PostgresDatabase, lanes
from perdure.store.postgres.driver import Connection, Pool, place_of
from perdure.store.postgres.errors import DataRefused
from perdure.store.postgres.lanes import keep_trying
from perdure.store.requests import Claimed
from perdure.testing import builders as make
from perdure.testing.conformance.base import history
from perdure.testing.embedded import core_of
from perdure.testing.proxy import FlakyProxy, flaky_proxy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def proxy(postgres: LocalPostgres) -> AsyncIterator[FlakyProxy]:
    async with flaky_proxy(postgres.port) as proxy:
        yield proxy


def through(proxy: FlakyProxy, dsn: str) -> str:
    name = dsn.rsplit("/", 1)[1]
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}?sslmode=disable"


async def look(database: PostgresDatabase, held: Claimed) -> RunRow:
    return await make.look(database.reader, held.row.facts.run_id)


async def until(holds: Callable[[RunRow], bool], database: PostgresDatabase, held: Claimed) -> None:
    """Return once it holds of the run's row, which another writer moves."""
    with anyio.fail_after(10):
        while not holds(await look(database, held)):  # noqa: ASYNC110 - there is no signal for it
            await anyio.sleep(0.01)


async def run_sql(dsn: str, statement: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetch(statement)
    finally:
        await connection.close()


@asynccontextmanager
async def locked_row(dsn: str, key: str, table: str = "run_state") -> AsyncGenerator[None]:
    """Lock a run's or a thread's row as a process does that was paused in a transaction."""
    locker = await asyncpg.connect(dsn)
    transaction = locker.transaction()
    await transaction.start()
    column = {"run_state": "run_id", "threads": "thread_id"}[table]
    query = f"SELECT 1 FROM {table} WHERE {column} = $1 FOR UPDATE"  # noqa: S608  # of a test
    await locker.execute(query, uuid_of(key))
    try:
        yield
    finally:
        await transaction.rollback()
        await locker.close()


async def warm(database: PostgresDatabase) -> tuple[Claimed, Commit]:
    """Claim a run and commit once, so that every statement is prepared; return the next commit."""
    held = await make.claimed(database.store)
    await make.write(database.store, make.commit_of(held.row, make.note("warm")))
    return held, make.commit_of(await look(database, held), make.note("once"))


# ---------------------------------------------------------------- unknown outcomes (F13)


async def test_a_commit_whose_answer_is_lost_is_written_exactly_once(
    proxy: FlakyProxy, postgres_dsn: str
) -> None:
    async with PostgresDatabase(through(proxy, postgres_dsn)) as database:
        held, commit = await warm(database)
        proxy.lose_answer()
        result = await make.write(database.store, commit)
        names = [event.type for event in await history(database.reader, held.row.facts.run_id)]
    assert proxy.lost == 1
    assert result.seq == commit.guard.expected_seq + 1
    assert names.count("custom") == 2


async def test_a_commit_with_rare_parts_whose_answer_is_lost_is_written_exactly_once(
    proxy: FlakyProxy, postgres_dsn: str
) -> None:
    async with PostgresDatabase(through(proxy, postgres_dsn)) as database:
        held, commit = await warm(database)
        proxy.lose_answer()
        result = await make.write(database.store, make.parked(commit, ready_in_s=0.0))
        names = [event.type for event in await history(database.reader, held.row.facts.run_id)]
        assert await database.reader.is_ready(held.row.facts.run_id)
    assert (proxy.lost, names.count("custom")) == (1, 2)
    assert result.seq == commit.guard.expected_seq + 1


async def test_an_insert_whose_answer_is_lost_makes_one_run(
    proxy: FlakyProxy, postgres_dsn: str
) -> None:
    async with PostgresDatabase(through(proxy, postgres_dsn)) as database:
        await warm(database)
        proxy.lose_answer(after=1)
        new = make.new_run(key="once")
        inserted = await database.store.insert_run(new)
        again = await database.store.insert_run(replace(make.new_run(key="once")))
    assert proxy.lost == 1
    assert inserted.row.facts.run_id == again.row.facts.run_id == new.run_id


async def test_a_cancel_whose_answer_is_lost_raises_the_epoch_once(
    proxy: FlakyProxy, postgres_dsn: str
) -> None:
    async with PostgresDatabase(through(proxy, postgres_dsn)) as database:
        held, _ = await warm(database)
        proxy.lose_answer()
        hot = await database.store.request_cancel(held.row.facts.run_id, make.cancel_wish())
    assert hot is not None
    assert (proxy.lost, hot.cancel_epoch) == (1, 1)


@pytest.mark.parametrize("knob", ["halves_answer", "halves_request"])
async def test_a_commit_that_is_cut_in_the_midst_of_a_message_is_written_exactly_once(
    proxy: FlakyProxy, postgres_dsn: str, knob: str
) -> None:
    """F13: half an answer, or half a request, and then the connection is gone."""
    async with PostgresDatabase(through(proxy, postgres_dsn)) as database:
        held, commit = await warm(database)
        setattr(proxy, knob, True)
        result = await make.write(database.store, commit)
        names = [event.type for event in await history(database.reader, held.row.facts.run_id)]
    assert (proxy.halved, names.count("custom")) == (1, 2)
    assert result.seq == commit.guard.expected_seq + 1


async def test_a_database_that_stays_away_is_unavailable(
    proxy: FlakyProxy, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with PostgresDatabase(through(proxy, postgres_dsn)) as database:
        _, commit = await warm(database)
        monkeypatch.setattr(lanes, "PATIENCE_S", 0.2)
        proxy.refuses = True
        proxy.cut_all()
        with pytest.raises(Unavailable):
            await database.store.commit([commit])
        with pytest.raises(Unavailable):
            await database.reader.ping()
        proxy.refuses = False
        monkeypatch.setattr(lanes, "PATIENCE_S", 8.0)
        await make.write(database.store, commit)
        await database.reader.ping()


# ---------------------------------------------------------------- killed and restarted: F12, F14


async def test_connections_killed_while_idle_come_back_at_the_next_write(
    postgres_dsn: str,
) -> None:
    """F14."""
    async with PostgresDatabase(postgres_dsn) as database:
        _, commit = await warm(database)
        await run_sql(
            postgres_dsn,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        await make.write(database.store, commit)
        await database.store.insert_run(make.new_run())
        assert len(await database.store.claim_runs(make.want())) == 1


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_no_acknowledged_commit_is_missing_after_a_restart(
    postgres: LocalPostgres, postgres_own_dsn: str, mode: StopMode
) -> None:
    """F12, R-1.6."""
    acknowledged = 0
    async with PostgresDatabase(postgres_own_dsn) as database:
        held = await make.claimed(database.store)
        restarted = anyio.Event()

        async def restart() -> None:
            await anyio.sleep(0.1)
            await anyio.to_thread.run_sync(lambda: postgres.restart(mode))
            restarted.set()

        async with anyio.create_task_group() as group:
            group.start_soon(restart)
            row = held.row
            while not restarted.is_set() or acknowledged < 20:
                await make.write(database.store, make.commit_of(row, make.note(str(acknowledged))))
                acknowledged += 1
                row = await look(database, held)
        events = await history(database.reader, held.row.facts.run_id)
    assert [event.type for event in events].count("custom") == acknowledged


# ---------------------------------------------------------------- schema


async def test_columns_added_under_load_disturb_nobody(postgres_own_dsn: str) -> None:
    """SCH-02: statements prepared before go on after the tables changed."""
    async with PostgresDatabase(postgres_own_dsn) as database:
        held, commit = await warm(database)
        for table in ("runs", "run_state", "events", "threads", "ready"):
            await run_sql(postgres_own_dsn, f"ALTER TABLE {table} ADD COLUMN extra text")
            await make.write(database.store, commit)
            await database.store.insert_run(make.new_run())
            assert len(await database.store.claim_runs(make.want())) == 1
            row = await look(database, held)
            commit = make.commit_of(row, make.note(table))
            await database.reader.events_after(row.facts.run_id, 0, limit=10)
        await make.write(database.store, commit)


# ---------------------------------------------------------------- locks (decisions 4 and 6)


async def test_a_commit_that_meets_a_cancel_in_flight_learns_of_it(postgres_dsn: str) -> None:
    async with PostgresDatabase(postgres_dsn) as database:
        held, commit = await warm(database)
        other = await make.claimed(database.store)
        beside = make.commit_of(other.row, make.note("beside"))
        canceller = await asyncpg.connect(postgres_dsn)
        transaction = canceller.transaction()
        await transaction.start()
        await canceller.execute(
            "UPDATE run_state SET cancel_epoch = cancel_epoch + 1 WHERE run_id = $1",
            held.row.facts.run_id.removeprefix("run_"),
        )
        results = await database.store.commit([commit, beside])  # the other does not wait
        await transaction.commit()
        await canceller.close()
        again = await database.store.commit([commit])
        names = [event.type for event in await history(database.reader, held.row.facts.run_id)]
    assert results[0] == Busy()
    assert isinstance(results[1], Committed)
    assert again == [CancelRequested(epoch=1)]
    assert names.count("custom") == 1


async def test_a_row_that_stays_locked_keeps_only_its_own_commit_waiting(postgres_dsn: str) -> None:
    """Decision 6: a worker's other runs go on, in batches with it and after it."""
    async with PostgresDatabase(postgres_dsn) as database, LocalSignals() as signals:
        busy, free = await make.claimed(database.store), await make.claimed(database.store)
        row = free.row
        committer = Committer(core_of(database, signals))
        locker = await asyncpg.connect(postgres_dsn)
        transaction = locker.transaction()
        await transaction.start()
        await locker.execute(
            "SELECT 1 FROM run_state WHERE run_id = $1 FOR UPDATE",
            busy.row.facts.run_id.removeprefix("run_"),
        )
        answers: list[CommitResult] = []

        async def send() -> None:
            answers.append(await committer.commit(make.commit_of(busy.row, make.note())))

        async with anyio.create_task_group() as group:
            group.start_soon(committer.run)
            group.start_soon(send)
            with anyio.fail_after(5):
                for _ in range(5):
                    answer = await committer.commit(make.commit_of(row, make.note()))
                    assert isinstance(answer, Committed)
                    row = await make.look(database.reader, row.facts.run_id)
                assert answers == []
                await transaction.commit()
                while not answers:  # noqa: ASYNC110  # the committer rings no bell of ours
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        await locker.close()
    assert [type(answer) for answer in answers] == [Committed]


async def test_work_that_is_cancelled_leaves_no_open_transaction_in_the_pool(
    postgres_dsn: str,
) -> None:
    """A shutdown cuts writes off; the driver must have nothing to complain of afterwards."""
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what["message"]))
    pool = Pool(postgres_dsn, size_max=1, pgbouncer=False)
    await pool.open()
    began = anyio.Event()

    async def work(connection: Connection) -> None:
        await connection.execute("SELECT 1")
        began.set()
        await anyio.sleep_forever()

    async def run() -> None:
        await lanes.Access(pool).run(work)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await began.wait()
        group.cancel_scope.cancel()
    assert len(await pool.fetch("SELECT 1")) == 1
    await pool.close()
    asyncio.get_running_loop().set_exception_handler(None)
    assert told == []


async def test_eight_databases_claim_distinct_runs(postgres_dsn: str) -> None:
    """R-12.1."""
    taken: list[str] = []

    async def work(database: PostgresDatabase, number: int) -> None:
        while found := await database.store.claim_runs(make.want(worker_id=f"w{number}", limit=3)):
            taken.extend(one.row.facts.run_id for one in found)

    async with PostgresDatabase(postgres_dsn) as first:
        async with anyio.create_task_group() as group:
            for _ in range(60):
                group.start_soon(first.store.insert_run, make.new_run())
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(_with_own_database, postgres_dsn, work, number)
        assert await first.store.claim_runs(make.want()) == []
    assert len(taken) == len(set(taken)) == 60


async def _with_own_database(
    dsn: str, work: Callable[[PostgresDatabase, int], Awaitable[None]], number: int
) -> None:
    async with PostgresDatabase(dsn) as database:
        await work(database, number)


async def test_claims_and_cancels_never_deadlock(postgres_own_dsn: str) -> None:
    async with PostgresDatabase(postgres_own_dsn) as database:
        runs = [make.new_run() for _ in range(40)]
        async with anyio.create_task_group() as group:
            for new in runs:
                group.start_soon(database.store.insert_run, new)
        async with anyio.create_task_group() as group:
            for new in reversed(runs):
                group.start_soon(database.store.request_cancel, new.run_id, make.cancel_wish())
            for _ in range(20):
                group.start_soon(database.store.claim_runs, make.want(limit=2))
    (row,) = await run_sql(
        postgres_own_dsn,
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
    )
    assert row["deadlocks"] == 0


# ---------------------------------------------------------------- retries: F16


async def test_what_the_server_rolled_back_is_sent_again() -> None:
    """F16."""
    errors = [asyncpg.DeadlockDetectedError("x"), asyncpg.SerializationError("x")]

    async def once(failed: int) -> str:
        if errors:
            raise errors.pop()
        return f"after {failed}"

    assert await keep_trying(once) == "after 2"


async def test_a_lock_that_never_comes_free_is_unavailable() -> None:
    """F16."""

    async def once(_: int) -> None:
        raise asyncpg.LockNotAvailableError("x")

    with pytest.raises(Unavailable):
        await keep_trying(once)


async def test_data_that_cannot_be_stored_is_not_sent_again() -> None:
    calls: list[int] = []

    async def once(failed: int) -> None:
        calls.append(failed)
        raise asyncpg.CharacterNotInRepertoireError("x")

    with pytest.raises(DataRefused):
        await keep_trying(once)
    assert calls == [0]


# ---------------------------------------------------------------- heartbeats (decision 16)


async def test_heartbeats_run_on_a_loop_of_their_own(postgres_dsn: str) -> None:
    answers: list[bool] = []
    async with PostgresDatabase(postgres_dsn) as database:
        held, _ = await warm(database)

        async def beat() -> None:
            for _ in range(3):
                renewals = await database.store.renew_leases(
                    make.WORKER, [make.lease_of(held)], 30.0
                )
                answers.extend(one.held for one in renewals)

        thread = threading.Thread(target=lambda: anyio.run(beat))
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        await beat()
    assert answers == [True] * 6


async def test_a_busy_row_does_not_hold_up_the_heartbeat_of_others(postgres_dsn: str) -> None:
    """Decision 6: the answer comes while the row is locked, and says so of that lease alone."""
    async with PostgresDatabase(postgres_dsn) as database:
        busy = await make.claimed(database.store)
        free = await make.claimed(database.store)
        leases = [make.lease_of(busy), make.lease_of(free)]
        async with locked_row(postgres_dsn, busy.row.facts.run_id):
            with anyio.fail_after(3):
                renewals = await database.store.renew_leases(make.WORKER, leases, 300.0)
        assert [(one.held, one.busy) for one in renewals] == [(True, True), (True, False)]
        assert (await look(database, free)).hot.lease_expires_at != free.row.hot.lease_expires_at
        assert (await look(database, busy)).hot.lease_expires_at == busy.row.hot.lease_expires_at
        renewals = await database.store.renew_leases(make.WORKER, leases, 300.0)
        assert [(one.held, one.busy) for one in renewals] == [(True, False)] * 2
        lost = replace(leases[0], token=7)
        async with locked_row(postgres_dsn, busy.row.facts.run_id):
            (renewal,) = await database.store.renew_leases(make.WORKER, [lost], 300.0)
        assert (renewal.held, renewal.busy) == (False, False)


async def test_a_server_that_is_not_there_is_named_in_one_line_without_the_password(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "PATIENCE_S", 2.0)
    caplog.set_level("INFO")
    with pytest.raises(Unavailable) as raised:
        async with PostgresDatabase("postgresql://me:secret@127.0.0.1:1/name"):
            pass
    assert "no PostgreSQL answers at 127.0.0.1:1" in raised.value.message
    assert "PERDURE_DB__URL" in raised.value.message
    (line,) = [record.getMessage() for record in caplog.records]
    assert "127.0.0.1:1" in line
    assert "secret" not in raised.value.message + line


async def test_a_database_that_is_not_there_is_named(postgres: LocalPostgres) -> None:
    with pytest.raises(Unavailable, match='database "nowhere" does not exist'):
        async with PostgresDatabase(postgres.dsn_of("nowhere")):
            pass


@pytest.mark.parametrize(
    ("dsn", "place"),
    [
        ("postgresql://me:secret@db.example/name", "db.example:5432"),
        ("postgresql://[::1]:6000/name", "[::1]:6000"),
        ("postgresql:///name?host=/run/postgresql", "the host that the driver chose"),
        ("postgresql://host:port/name", "the host of the DSN"),
    ],
)
def test_a_place_is_host_and_port_alone(dsn: str, place: str) -> None:
    assert place_of(dsn) == place
