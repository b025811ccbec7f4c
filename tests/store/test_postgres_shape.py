"""The shape of the work on PostgreSQL: plans, updates in place, migrations."""

import re
from dataclasses import replace
from typing import cast

import anyio
import asyncpg
import pytest

from perdure.ops.local_postgres import LocalPostgres
from perdure.protocol.errors import Unavailable
from perdure.protocol.ids import uuid_of
from perdure.protocol.states import ToolCallStatus
from perdure.store.commits import CallUpdate, Commit
from perdure.store.migrate import SchemaRefused
from perdure.store.postgres import PostgresDatabase, driver, lanes, migrator, state_values
from perdure.store.postgres.driver import SETTINGS
from perdure.store.postgres.lanes import Lane
from perdure.store.postgres.optional import compose
from perdure.store.postgres.statements import SQL
from perdure.testing import builders as make
from perdure.testing.conformance.state_values import ending, held, value_of

pytestmark = pytest.mark.timeout(60)

HOT_STATEMENTS = [
    ("claim_candidates", "ready_in_order", "(priority = l_1.priority) AND (available_at <="),
    ("lock_ready_runs", "run_state_pkey", "run_id ="),
    ("lock_ready_runs", "attempts_pkey", "(run_id = s.run_id) AND (attempt = s.attempt)"),
    ("lock_free_runs", "run_state_pkey", "run_id ="),
    ("take_runs", "ready_pkey", "run_id ="),
    ("renew_leases", "run_state_held", "lease_owner ="),
    ("leases_of", "run_state_held", "lease_owner ="),
    ("expired_leases", "run_state_held", "lease_owner IS NOT NULL"),
    ("page_of_runs", "run_state_kept", "(run_id > $1) AND (finished_at <="),
    ("find_runs", "runs_pkey", "run_id ="),
    ("find_idempotent_run", "runs_by_key", "(agent_id = $3) AND (idempotency_key = $4)"),
    ("events_after", "events_pkey", "(run_id = $1) AND (seq > $2)"),
    ("due_timers", "timers_by_due", "due_at <="),
    ("unmoved_runs", "run_state_unfinished", "run_id >"),
    ("list_runs", "runs_by_tenant", "(tenant_id = $2) AND (run_id <"),
    ("list_all_runs", "runs_pkey", "run_id <"),
    ("list_unfinished_runs", "run_state_unfinished", ""),
    ("list_thread_runs", "runs_by_thread", "thread_id ="),
    ("list_child_runs", "runs_by_parent", "(parent_run_id = $6) AND (run_id <"),
    ("list_tree_runs", "runs_by_root", "(root_run_id = $3) AND (run_id <"),
    ("thread_runs", "messages_pkey", '(thread_id = $1) AND ("position" > $2)'),
    ("list_steps", "steps_pkey", "(run_id = $1) AND (step_index > $2)"),
    ("list_tool_calls", "tool_calls_by_run", "ROW(step_index, ordinal) > ROW($2, $3)"),
    ("open_executions", "tool_calls_by_run", "run_id ="),
    ("list_checkpoints", "checkpoints_pkey", "(run_id = $1) AND (seq <"),
    ("list_messages", "messages_pkey", '("position" > $2) AND ("position" <='),
    ("list_interrupts", "interrupts_by_tenant", "(tenant_id = $1) AND (interrupt_id >"),
    ("list_pending_interrupts", "interrupts_pending", "(tenant_id = $1) AND (interrupt_id >"),
    ("list_run_interrupts", "interrupts_by_run", "(run_id = $3) AND (interrupt_id >"),
    ("list_artifacts", "artifacts_by_tenant", "(tenant_id = $1) AND (artifact_id >"),
    ("list_run_artifacts", "artifacts_by_run", "(run_id = $3) AND (artifact_id >"),
    ("list_thread_artifacts", "artifacts_by_thread", "(thread_id = $3) AND (artifact_id >"),
    ("moved_state_values", "state_values_pkey", "(scope = u.scope) AND (scope_id = u.scope_id)"),
    ("insert_state_values", "runs_pkey", "run_id ="),
    ("update_state_values", "state_values_pkey", "(scope = u.scope) AND (scope_id = u.scope_id)"),
    ("list_threads", "threads_by_tenant", "(tenant_id = $1) AND (thread_id <"),
]
"""A statement, an index it reads by, and what of its conditions the index answers itself."""

PARTS = set(re.findall(r"/\*\[(\w+)\]\*/", SQL["commit_batch"]))
STEPS = 10


async def test_the_hot_statements_find_their_rows_by_an_index(postgres_own_dsn: str) -> None:
    """Also before anything is known of how many rows there are (sequential scans are off)."""
    connection = await asyncpg.connect(postgres_own_dsn, server_settings=SETTINGS)
    try:
        for name, index, condition in HOT_STATEMENTS:
            plan = await _plan_of(connection, SQL[name])
            assert "Seq Scan" not in plan, plan
            assert _reads_by(plan, index, condition), f"{name} by {index} {condition}:\n{plan}"
    finally:
        await connection.close()


def test_an_index_that_is_only_filtered_is_no_index() -> None:
    """What the test above would not see: the whole index is read, row by row."""
    plan = "->  Index Scan using runs_pkey on runs r\n      Filter: (tenant_id = $2)"
    assert not _reads_by(plan, "runs_pkey", "tenant_id = $2")
    assert _reads_by(plan.replace("Filter", "Index Cond"), "runs_pkey", "tenant_id = $2")


def _reads_by(plan: str, index: str, condition: str) -> bool:
    scan = rf"Index (Only )?Scan (Backward )?using {index} on [^\n]*\n"
    known = rf"\s*Index Cond: [^\n]*{re.escape(condition)}" if condition else ""
    return re.search(scan + known, plan) is not None


async def test_a_commit_reads_by_index_whatever_it_holds(postgres_own_dsn: str) -> None:
    for present in (set[str](), *({part, "thread"} for part in sorted(PARTS)), PARTS):
        statement, _ = compose("commit_batch", frozenset(present))
        await _check_plan(postgres_own_dsn, statement)


async def _check_plan(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn, server_settings=SETTINGS)
    try:
        plan = await _plan_of(connection, statement)
    finally:
        await connection.close()
    assert "Seq Scan" not in plan, plan
    scans = re.findall(r"Scan[^\n]* using (\w+) on (\w+)[^\n]*\n\s*(\w[^\n]*)", plan)
    assert [scan for scan in scans if not scan[2].startswith("Index Cond:")] == [], plan


async def _plan_of(connection: "asyncpg.Connection[asyncpg.Record]", statement: str) -> str:
    count = len(set(re.findall(r"\$(\d+)", statement)))
    await connection.execute(f"PREPARE hot AS {statement}")
    rows = await connection.fetch(f"EXPLAIN (COSTS OFF) EXECUTE hot({', '.join(['NULL'] * count)})")
    await connection.execute("DEALLOCATE hot")
    return "\n".join(row[0] for row in rows)


async def test_all_fields_of_a_commit_are_written_together(postgres_own_dsn: str) -> None:
    """R-1.5: a run leaves up to 100 of them, while its row is locked: one statement to look, one for
    rows that are new, one for the others; one that has moved is told."""
    async with PostgresDatabase(postgres_own_dsn) as database:
        await database.store.insert_run(make.new_run())
        run = (await make.claim_one(database.store)).row
        opened = await asyncpg.connect(postgres_own_dsn)
        connection = cast("driver.Connection", opened)
        try:
            statements: list[str] = []
            opened.add_query_logger(lambda one: statements.append(one.query))

            def ends(expected: int) -> Commit:
                values = [value_of(run, n, name=f"f{n}", expected=expected) for n in range(40)]
                return ending(run, *values, value_of(run, 1, name=f"new{expected}"))

            for expected in range(2):
                assert not await state_values.have_moved(connection, ends(expected))
                assert await state_values.keep(connection, ends(expected), run.hot.updated_at)
            late = replace(ends(1), state_values=ends(1).state_values[:-1])
            assert await state_values.have_moved(connection, late)
            assert not await state_values.keep(connection, late, run.hot.updated_at)
            await connection.fetch("SELECT 1")  # the one before is told of by now
            assert sum("state_values" in one for one in statements) == 2 + 3 + 2
        finally:
            await connection.close()
        rows = await held(database.reader, run.facts.thread_id)
        assert rows == {f"f{n}": (n, 2) for n in range(40)} | {"new0": (1, 1), "new1": (1, 1)}


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


# ---------------------------------------------------------------- what no statement may do


async def test_the_database_itself_refuses_what_breaks_the_record(postgres_own_dsn: str) -> None:
    """R-2.1, decision 9: illegal transitions, changes after an end, changes of events."""
    async with PostgresDatabase(postgres_own_dsn) as database:
        store, reader = database.store, database.reader
        held = await make.claimed(store)
        row, call = await make.with_call(store, reader, held.row)
        done = replace(
            make.commit_of(row, make.result_of(call)),
            call_updates=(
                CallUpdate(tool_call_id=call.tool_call_id, status=ToolCallStatus.FAILED),
            ),
        )
        await make.write(store, done)
        await make.finish(store, reader, row.facts.run_id)
        asked = await make.claimed(store)
    statements = [
        "UPDATE run_state SET state = 'planning', finished_at = NULL WHERE state = 'succeeded'",
        "UPDATE run_state SET state = 'failed' WHERE state = 'succeeded'",
        "UPDATE run_state SET code = 'INTERNAL' WHERE state = 'succeeded'",
        "UPDATE run_state SET parked_on = 'timer' WHERE state = 'succeeded'",
        "UPDATE run_state SET last_seq = last_seq - 1 WHERE state <> 'succeeded'",
        "UPDATE run_state SET lease_expires_at = NULL WHERE state <> 'succeeded'",
        "UPDATE run_state SET state = 'pending' WHERE state <> 'succeeded'",
        "UPDATE tool_calls SET status = 'succeeded'",
        "UPDATE events SET step_index = 7",
    ]
    connection = await asyncpg.connect(postgres_own_dsn)
    try:
        moved = "UPDATE run_state SET state = 'planning', faults = faults WHERE run_id = $1"
        await connection.execute(moved, uuid_of(asked.row.facts.run_id))
        for statement in statements:
            with pytest.raises(asyncpg.CheckViolationError):
                await connection.execute(statement)
    finally:
        await connection.close()


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


async def test_a_migration_takes_longer_than_a_statement_may(
    postgres: LocalPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCH-06: as an index on a large table does."""
    dsn = await anyio.to_thread.run_sync(postgres.create_database, "lasting")
    first = migrator.MIGRATIONS[0]
    slow = replace(first, sql=f"SELECT pg_sleep(0.5); {first.sql}")
    monkeypatch.setattr(migrator, "MIGRATIONS", [slow, *migrator.MIGRATIONS[1:]])
    monkeypatch.setattr(lanes, "SILENCE_S", 0.3)
    monkeypatch.setattr(lanes, "PATIENCE_S", 0.1)
    monkeypatch.setitem(driver.SETTINGS, "statement_timeout", "300ms")
    async with PostgresDatabase(dsn) as database:
        monkeypatch.undo()
        await database.reader.ping()
    await anyio.to_thread.run_sync(postgres.drop_database, "lasting")


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
