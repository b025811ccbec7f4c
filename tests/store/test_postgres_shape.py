"""The shape of the work on PostgreSQL: plans, updates in place, migrations."""

import re
from dataclasses import replace

import anyio
import asyncpg
import pytest

from perdure.ops.local_postgres import LocalPostgres
from perdure.protocol.errors import Unavailable
from perdure.store.migrate import SchemaRefused
from perdure.store.postgres import PostgresDatabase, migrator
from perdure.store.postgres.driver import SETTINGS
from perdure.store.postgres.lanes import Lane
from perdure.store.postgres.optional import compose
from perdure.store.postgres.statements import SQL
from perdure.testing import builders as make

pytestmark = pytest.mark.timeout(60)

HOT_STATEMENTS = (
    "claim_candidates",
    "lock_ready_runs",
    "take_runs",
    "renew_leases",
    "expired_leases",
    "insert_run",
    "find_run",
    "events_after",
    "due_timers",
    "list_runs",
    "list_thread_runs",
    "list_steps",
    "list_tool_calls",
    "open_executions",
    "list_checkpoints",
    "list_messages",
)
PARTS = set(re.findall(r"/\*\[(\w+)\]\*/", SQL["commit_batch"]))
STEPS = 10


@pytest.mark.parametrize("name", HOT_STATEMENTS)
async def test_a_hot_statement_reads_by_index(postgres_dsn: str, name: str) -> None:
    await _check_plan(postgres_dsn, SQL[name])


@pytest.mark.parametrize(
    "present", [set[str](), *({part, "thread"} for part in sorted(PARTS)), PARTS]
)
async def test_a_commit_reads_by_index_whatever_it_holds(
    postgres_dsn: str, present: set[str]
) -> None:
    statement, _ = compose("commit_batch", frozenset(present))
    await _check_plan(postgres_dsn, statement)


async def _check_plan(dsn: str, statement: str) -> None:
    count = len(set(re.findall(r"\$(\d+)", statement)))
    connection = await asyncpg.connect(dsn, server_settings=SETTINGS)
    try:
        await connection.execute(f"PREPARE hot AS {statement}")
        nulls = ", ".join(["NULL"] * count)
        rows = await connection.fetch(f"EXPLAIN EXECUTE hot({nulls})")
    finally:
        await connection.close()
    plan = "\n".join(row[0] for row in rows)
    assert "Seq Scan" not in plan, plan


async def test_the_hot_row_is_nearly_always_updated_in_place(postgres_own_dsn: str) -> None:
    async with PostgresDatabase(postgres_own_dsn) as database:
        store, reader = database.store, database.reader
        for _ in range(8):
            await store.insert_run(make.new_run())
        held = await store.claim_runs(make.want())
        for number in range(2 * STEPS):
            rows = [await make.look(reader, one.row.facts.run_id) for one in held]
            await store.commit([make.commit_of(row, make.note(str(number))) for row in rows])
            if number % 5 == 0:
                await store.renew_leases(make.WORKER, [make.lease_of(one) for one in held], 30.0)
        for one in held:
            await make.finish(store, reader, one.row.facts.run_id)
    connection = await asyncpg.connect(postgres_own_dsn)
    try:
        row = await connection.fetchrow(
            "SELECT n_tup_upd AS all, n_tup_hot_upd AS hot FROM pg_stat_user_tables"
            " WHERE relname = 'run_state'"
        )
    finally:
        await connection.close()
    assert row is not None
    assert row["all"] >= 8 * 2 * STEPS
    assert row["hot"] / row["all"] > 0.9


# ---------------------------------------------------------------- migrations (decision 42)


async def test_several_processes_may_start_at_once_on_an_empty_database(
    postgres: LocalPostgres,
) -> None:
    dsn = await anyio.to_thread.run_sync(postgres.create_database, "starting")

    async def start() -> None:
        async with PostgresDatabase(dsn) as database:
            await database.reader.ping()

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(start)
    await anyio.to_thread.run_sync(postgres.drop_database, "starting")


async def test_who_waits_for_a_migration_waits_bounded(
    postgres: LocalPostgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SCH-06: said in the log; a worker that starts meanwhile is open only afterwards."""
    dsn = await anyio.to_thread.run_sync(postgres.create_database, "waiting")
    started = anyio.Event()

    async def start_worker() -> None:
        async with PostgresDatabase(dsn) as database:
            await database.reader.ping()
            started.set()

    other = await asyncpg.connect(dsn)
    lane = Lane(dsn)
    try:
        await other.execute("SELECT pg_advisory_lock($1)", migrator.LOCK)
        with pytest.raises(Unavailable, match="migrating"):
            await migrator.migrate(lane, wait_s=0.1)
        assert "waiting for another process" in caplog.text
        caplog.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(start_worker)
            while "waiting for another process" not in caplog.text:  # noqa: ASYNC110  # a log rings no bell
                await anyio.sleep(0.005)
            assert not started.is_set()
            await other.execute("SELECT pg_advisory_unlock($1)", migrator.LOCK)
            with anyio.fail_after(10):
                await started.wait()
    finally:
        await lane.close()
        await other.close()
        await anyio.to_thread.run_sync(postgres.drop_database, "waiting")


async def test_a_newer_database_is_refused_with_both_versions(postgres_own_dsn: str) -> None:
    connection = await asyncpg.connect(postgres_own_dsn)
    code = migrator.SCHEMA_VERSION_OF_CODE
    await connection.execute(
        "INSERT INTO schema_migrations (version, name, checksum) VALUES ($1, 'later', 'x')",
        code + 1,
    )
    await connection.close()
    with pytest.raises(SchemaRefused, match=f"{code + 1}.*{code}"):
        async with PostgresDatabase(postgres_own_dsn):
            pass


# ---------------------------------------------------------------- a queue within a thread


async def test_a_thread_with_a_queue_hands_over_in_the_same_commit(postgres_dsn: str) -> None:
    async with PostgresDatabase(postgres_dsn) as database:
        first = make.new_run()
        held = await make.claimed(database.store, first)
        second = replace(make.new_run(thread_id=first.thread_id), queue="default")
        inserted = await database.store.insert_run(second)
        assert inserted.row.hot.parked_on == "thread"
        await make.finish(database.store, database.reader, held.row.facts.run_id)
        assert await database.reader.is_ready(second.run_id)
