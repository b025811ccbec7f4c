"""Named SQL files, and migrations as data."""

from pathlib import Path

import pytest

from perdure.store.migrate import (
    Applied,
    BadMigration,
    Migration,
    SchemaRefused,
    make_migration,
    plan_migrations,
    read_migrations,
)
from perdure.store.sqlfiles import BadSqlFile, load_statements, parse_statements


def test_a_block_is_a_statement_without_its_comments_and_semicolon() -> None:
    text = "-- about\n\n-- name: find_run\n-- why\nSELECT *\nFROM runs;\n\n-- name: ping_runs\nSELECT 1"
    assert parse_statements(text, "a.sql") == {
        "find_run": "SELECT *\nFROM runs",
        "ping_runs": "SELECT 1",
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("SELECT 1;", "before the first name"),
        ("-- name: find_run\n", "is empty"),
        ("-- name: findrun\nSELECT 1;", "verb_noun"),
        ("-- name:\nSELECT 1;", "verb_noun"),
        ("-- name: find_run\nSELECT 1;\n-- name: find_run\nSELECT 2;", "is there twice"),
    ],
)
def test_a_file_that_breaks_the_rules_is_refused(text: str, reason: str) -> None:
    with pytest.raises(BadSqlFile, match=reason):
        parse_statements(text, "a.sql")


def test_a_name_stands_in_one_file_only(tmp_path: Path) -> None:
    for name in ("a.sql", "b.sql"):
        (tmp_path / name).write_text("-- name: find_run\nSELECT 1;\n", encoding="utf-8")
    with pytest.raises(BadSqlFile, match=r"b\.sql: find_run is in another file too"):
        load_statements(tmp_path)


def test_files_that_are_not_sql_are_passed_by(tmp_path: Path) -> None:
    (tmp_path / "a.sql").write_text("-- name: find_run\nSELECT 1;\n", encoding="utf-8")
    (tmp_path / "notes.md").write_text("no", encoding="utf-8")
    assert load_statements(tmp_path) == {"find_run": "SELECT 1"}


# ---------------------------------------------------------------- migrations


def migrations(count: int) -> list[Migration]:
    """Return numbered migrations."""
    return [
        make_migration(number, f"m{number}", f"SELECT {number};") for number in range(1, count + 1)
    ]


def applied(*found: Migration) -> list[Applied]:
    """Return the rows that applied migrations leave."""
    return [Applied(version=one.version, name=one.name, checksum=one.checksum) for one in found]


def test_what_the_database_lacks_is_planned_in_order() -> None:
    known = migrations(3)
    assert plan_migrations(known, []) == known
    assert plan_migrations(known, applied(known[0])) == known[1:]
    assert plan_migrations(known, applied(*known)) == []


def test_a_newer_database_is_refused_beyond_the_window() -> None:
    known = migrations(3)
    with pytest.raises(SchemaRefused, match="schema version 3, this code knows version 2"):
        plan_migrations(known[:2], applied(*known))
    assert plan_migrations(known[:2], applied(*known), ahead_max=1) == []


def test_another_text_or_a_gap_is_refused() -> None:
    known = migrations(2)
    changed = make_migration(1, "m1", "SELECT 9;")
    with pytest.raises(SchemaRefused, match="another text"):
        plan_migrations(known, applied(changed))
    with pytest.raises(SchemaRefused, match="gap"):
        plan_migrations(known, applied(known[1]))


def test_the_kind_of_line_end_does_not_change_a_checksum() -> None:
    assert (
        make_migration(1, "a", "A;\r\nB;\r\n").checksum
        == make_migration(1, "a", "A;\nB;\n").checksum
    )


def test_files_are_read_by_number_without_gaps(tmp_path: Path) -> None:
    (tmp_path / "0002_more.sql").write_text("SELECT 2;", encoding="utf-8")
    with pytest.raises(BadMigration):
        read_migrations(tmp_path)
    (tmp_path / "0001_core.sql").write_text("SELECT 1;", encoding="utf-8")
    (tmp_path / "README.md").write_text("no", encoding="utf-8")
    assert [(one.version, one.name) for one in read_migrations(tmp_path)] == [
        (1, "core"),
        (2, "more"),
    ]
