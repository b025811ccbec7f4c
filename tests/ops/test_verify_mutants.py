"""Verification finds nothing in a clean history, and each single fault by the check named for it."""

import json
import re
import shutil
import sqlite3
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from perdure.ops.verify import CHECKS, WAITING, Finding, VerifyReport, verifier, verify
from perdure.ops.verify.left import Left
from perdure.ops.verify.marks import Marks
from perdure.ops.verify.outside import read_journal
from perdure.protocol.errors import NotFound
from perdure.store.sqlite import SqliteDatabase
from tests.ops.invariants import COMMAND, NAME, page
from tests.ops.verify_history import History, make_history
from tests.ops.verify_mutants import MUTANTS, TYPES, Mutant, by_check

PAGE = Path(__file__).parents[2] / "docs" / "reference" / NAME


@pytest.fixture(scope="module")
async def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """One clean history for all tests of this module."""
    folder = tmp_path_factory.mktemp("history")
    path = folder / "clean.db"
    return await make_history(path, folder / "journal")


async def findings_of(
    path: Path,
    run_id: str | None = None,
    *,
    now: datetime | None = None,
    journal: Path | None = None,
) -> tuple[list[Finding], VerifyReport]:
    """Verify a file; return what was found and the report."""
    found: list[Finding] = []
    effects = None if journal is None else read_journal(journal)
    async with SqliteDatabase(path) as database:
        report = await verify(
            database.reader, run_id=run_id, on_finding=found.append, now=now, journal=effects
        )
    return found, report


async def test_a_clean_history_yields_no_finding(history: History) -> None:
    found, report = await findings_of(history.path, now=history.at, journal=history.journal)
    assert found == []
    assert report.is_clean
    assert (report.runs, report.moving, report.unreadable) == (len(history.runs), 0, 0)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.check}: {mutant.name}")
async def test_a_fault_is_caught_by_its_check(
    mutant: Mutant, history: History, tmp_path: Path
) -> None:
    path, journal = tmp_path / "mutant.db", tmp_path / "journal"
    shutil.copy(history.journal, journal)
    keys = mutate(mutant, history, path)
    with journal.open("a") as file:
        file.writelines(json.dumps({"key": key}) + "\n" for key in keys)
    run_id = None if mutant.whole else history.runs[mutant.scene]
    now = None if mutant.in_s is None else history.at + timedelta(seconds=mutant.in_s)
    found, report = await findings_of(path, run_id, now=now, journal=journal)
    assert mutant.check in {finding.check for finding in found}, found
    assert not report.is_clean
    if mutant.in_journal:
        assert {finding.check for finding in found} == {mutant.check}
    if not mutant.whole:
        assert {finding.run_id for finding in found} == {run_id}


async def test_versions_that_do_not_fit_into_memory_are_looked_at_in_passes(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I68 in bounded memory: one version at a time, and the one left by two runs is found once."""
    monkeypatch.setattr(verifier, "Left", lambda: Left(versions_max=1))
    clean, _ = await findings_of(history.path)
    assert clean == []
    path = tmp_path / "mutant.db"
    mutate(next(mutant for mutant in MUTANTS if mutant.check == "I68"), history, path)
    found, _ = await findings_of(path)
    assert [finding.check for finding in found].count("I68") == 1


@pytest.mark.parametrize("marks_max", [1, 2, 3, 100])
def test_what_is_shown_again_is_told_once_over_all_passes(marks_max: int) -> None:
    """I27, I68: also what was told before a split left it to a later pass."""
    shown = [name for name in "abcdefgh" for _ in range(3)] + list("hgfedcba")
    marks = Marks(marks_max)
    told: Counter[str] = Counter()
    while True:
        told.update(name for name in shown if marks.is_again(name))
        if not marks.next_partition():
            break
    assert told == dict.fromkeys("abcdefgh", 3)


def mutate(mutant: Mutant, history: History, path: Path) -> list[str]:
    """Write a copy of the history with one fault in it; return the keys of effects too many."""
    shutil.copy(history.path, path)
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA ignore_check_constraints = ON")
        for name, kind in db.execute(
            "SELECT name, type FROM sqlite_schema WHERE type = 'trigger' OR (type = 'index'"
            " AND sql LIKE 'CREATE UNIQUE%')"
        ).fetchall():
            db.execute(f"DROP {kind} {name}")
        values = {
            "run": key_of(history.runs[mutant.scene]),
            "other": key_of(history.runs[mutant.other]),
            **TYPES,
        }
        before, rows = db.total_changes, list[tuple[str]]()
        for statement in mutant.statements:
            named = set(re.findall(r":(\w+)", statement))
            rows += db.execute(statement, {name: values[name] for name in named & set(values)})
        changed = bool(rows) if mutant.in_journal else db.total_changes > before
        assert changed or mutant.in_s is not None, "the fault changes nothing"
        return [key for (key,) in rows]
    finally:
        db.close()


def key_of(run_id: str) -> bytes:
    """Return the bytes of an id, as SQLite keeps it."""
    return bytes.fromhex(run_id.removeprefix("run_"))


async def test_a_run_that_is_not_there_is_not_found(history: History) -> None:
    with pytest.raises(NotFound):
        await findings_of(history.path, "run_" + "0" * 32)


def test_every_check_has_a_mutant() -> None:
    assert set(by_check()) == set(CHECKS)
    names = [(mutant.check, mutant.name) for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_a_check_that_waits_is_not_made() -> None:
    assert not set(WAITING) & set(CHECKS)
    catalogue = {f"I{number:02}" for number in range(1, 53)}
    assert catalogue <= set(WAITING) | set(CHECKS)
    assert {f"C{number}" for number in range(1, 9)} <= set(WAITING) | set(CHECKS)
    assert {f"L{number}" for number in range(1, 9)} <= set(WAITING) | set(CHECKS)


def test_the_reference_page_is_generated_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"run: .venv/bin/{COMMAND}"
