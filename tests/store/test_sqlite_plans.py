"""The statements of the SQLite adapter: all are used, none of the hot ones walks a table."""

import re
import sqlite3
from collections.abc import Iterator
from importlib.resources import files

import pytest

from perdure.store.sqlite.connection import SQL
from perdure.store.sqlite.schema import known_migrations, split_script

WALKS = {
    "list_runs",  # by the primary key, from the newest
    "list_unfinished_runs",  # by an index of unfinished runs alone
    "list_threads",  # by the primary key, from the newest
    "list_agents",
    "list_tools",
    "count_states",  # by an index of unfinished runs alone
    "count_open_interrupts",  # by an index of pending interrupts alone
    "count_ready",  # what waits is counted
    "ping_runs",
    "expired_leases",  # by an index of held runs alone
    "page_of_blobs",  # a page by rowid
    "deleted_runs",  # by an index of deleted threads alone
}
"""What may walk a table or an index, and why that is short or rare."""

SORTS = {
    "expired_leases",  # the held runs that have expired
    "due_timers",  # timers due at one time
    "timers_of",  # a run's few timers
    "list_executions",
    "list_runs_from",  # the few runs that go on from one
    "open_executions",
    "list_late",
    "list_agents",
    "list_tools",
    "count_states",
}
"""What may sort what it found."""


GIVEN = re.compile(r"json_each|CONSTANT ROW|^SCAN v$|^SCAN \(subquery|^SCAN (levels|p)$")
"""Walks over what a statement was given, over the few priorities that there are, over a page."""


@pytest.fixture(scope="module")
def schema() -> Iterator[sqlite3.Connection]:
    """An empty database with the schema."""
    connection = sqlite3.connect(":memory:")
    for migration in known_migrations():
        for statement in split_script(migration.sql):
            connection.execute(statement)
    yield connection
    connection.close()


def plan_of(connection: sqlite3.Connection, statement: str) -> list[str]:
    """Return the lines of a statement's plan."""
    for count in range(40):
        try:
            rows = connection.execute("EXPLAIN QUERY PLAN " + statement, (None,) * count)
        except sqlite3.ProgrammingError:
            continue
        return [row[3] for row in rows.fetchall()]
    raise AssertionError("too many parameters")


@pytest.mark.parametrize("name", sorted(SQL))
def test_statements_find_their_rows_by_an_index(schema: sqlite3.Connection, name: str) -> None:
    plan = [line for line in plan_of(schema, SQL[name]) if not GIVEN.search(line)]
    if name not in WALKS:
        assert [line for line in plan if line.startswith("SCAN")] == []
    if name not in SORTS:
        assert [line for line in plan if "TEMP B-TREE" in line] == []


@pytest.mark.parametrize(
    ("name", "index"),
    [
        (
            "claim_candidates",
            "ready_in_order (queue=? AND suspected=? AND priority=? AND available_at<?)",
        ),
        ("events_after", "sqlite_autoindex_events_1 (run_id=? AND seq>?)"),
        ("expired_leases", "run_state_held"),
        ("count_states", "run_state_unfinished"),
        ("unmoved_runs", "run_state_unfinished"),
        ("list_unfinished_runs", "run_state_unfinished"),
        ("list_thread_runs", "runs_by_thread"),
        ("list_child_runs", "runs_by_parent"),
        ("list_runs_from", "runs_by_origin"),
        ("list_pending_interrupts", "interrupts_pending"),
        ("list_run_interrupts", "interrupts_by_run"),
        ("due_timers", "timers_by_time ((due_at,run_id,kind,ref)>(?,?,?,?) AND due_at<?)"),
        ("leases_of", "run_state_held"),
        ("find_idempotent_run", "runs_by_idempotency_key"),
        ("list_tool_calls", "(run_id=? AND (step_index,ordinal)>(?,?))"),
    ],
)
def test_hot_and_paged_statements_use_their_index(
    schema: sqlite3.Connection, name: str, index: str
) -> None:
    plan = "\n".join(plan_of(schema, SQL[name]))
    assert index in plan, plan


def test_every_statement_is_used() -> None:
    """`<name>_one` is found by `write_rows` under the name of the other."""
    folder = files("perdure.store.sqlite")
    sources = [file.read_text("utf-8") for file in folder.iterdir() if file.name.endswith(".py")]
    called = {name: name.removesuffix("_one") for name in SQL}
    unused = [
        name for name, word in called.items() if not any(f'"{word}"' in text for text in sources)
    ]
    assert unused == []
