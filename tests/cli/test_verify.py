"""`perdure verify`: what it looks at, what it says, and its exit code."""

import json
import re
import sqlite3
from contextlib import closing

import pytest

from perdure.cli import verify
from perdure.ops.exits import ExitCode
from tests.cli.program import Program
from tests.cli.shop import REFERENCE

HERE = ("--here", "--agents", REFERENCE, "--timeout", "15")


def _damage(program: Program, statement: str) -> None:
    database = program.folder / ".perdure" / "perdure.db"
    with closing(sqlite3.connect(database)) as connection, connection:
        assert connection.execute(statement).rowcount > 0


def test_a_finding_is_told_with_its_check_and_exit_code(
    perdure: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-7.7: by run, by tenant, as text and as JSON; of very many only so many are printed."""
    ids = [perdure("run", "echo", "--json", *HERE).json["run_id"] for _ in range(2)]
    clean = perdure("verify", "--tenant", "default", "--json")
    assert (clean.code, clean.json["runs"], clean.json["by_check"]) == (0, 2, {})
    _damage(perdure, "UPDATE run_state SET finished_at = NULL")
    one = perdure("verify", "--run", ids[0], "--json")
    assert one.code == 1
    assert {finding["run_id"] for finding in one.json["findings"]} == {ids[0]}
    assert one.json["by_check"]["I47"] == 1
    both = perdure("verify", "--tenant", "default")
    assert both.code == 1
    assert both.out.count("I47") == 2
    assert perdure("verify", "--tenant", "other", "--json").json["runs"] == 0
    missing = perdure("verify", "--run", "run_" + "0" * 32).err
    assert missing == "error: not_found: there is no such run (--run)\n"
    for option in ("--run", "--tenant"):
        assert perdure("verify", option, "run_" + "0" * 32).code in {0, 4}
    monkeypatch.setattr(verify, "FINDINGS_MAX", 1)
    few = perdure("verify", "--json").json
    assert len(few["findings"]) == 1
    assert few["findings_left_out"] == sum(few["by_check"].values()) - 1


def test_a_journal_is_compared_and_a_broken_one_is_refused(perdure: Program) -> None:
    """C3: what tools did outside, one object with its key a line."""
    perdure("run", "echo", *HERE)
    journal = perdure.folder / "journal.jsonl"
    journal.write_text("")
    assert perdure("verify", "--journal", str(journal)).code == 0
    journal.write_text(json.dumps({"key": "k", "amount": 3}) + "\n")
    done = perdure("verify", "--journal", str(journal), "--json")
    assert (done.code, done.json["by_check"]) == (1, {"C3": 1})
    for text in ("{", "[]", '{"key": 1}', '{"key": "\\ud800"}'):
        journal.write_text('{"key": "k"}\n' + text)
        refused = perdure("verify", "--journal", str(journal))
        assert refused.code == 2
        assert "line 2" in refused.err
    assert perdure("verify", "--journal", str(journal) + ".none").code == 2


def test_what_was_done_after_a_backup_is_found_by_the_journal_alone(perdure: Program) -> None:
    """C3: the restored database is whole, and its runs would have the effects a second time."""
    perdure("run", "echo", *HERE)
    waits = perdure("run", "ships", "--json", *HERE).json["run_id"]
    decides = perdure("run", "ships", "--json").json["run_id"]
    database = perdure.folder / ".perdure" / "perdure.db"
    backup = perdure.folder / "backup.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("VACUUM INTO ?", (str(backup),))
    keys = [_key_once_it_ended(perdure, run_id) for run_id in (waits, decides)]
    journal = perdure.folder / "effects.jsonl"
    journal.write_text("".join(json.dumps({"key": key}) + "\n" for key in keys))
    assert perdure("verify", "--journal", str(journal)).code == 0
    for path in (database, *database.parent.glob("*-wal"), *database.parent.glob("*-shm")):
        path.unlink()
    backup.rename(database)
    assert perdure("verify").code == 0
    found = perdure("verify", "--journal", str(journal))
    assert found.code == 1
    assert f"C3    {keys[1]}: 1 effects under a key that no call has\n" in found.out
    assert re.search(
        rf"^C3  {waits}  tc_\w+: 1 effects, 0 are accounted for$", found.out, re.MULTILINE
    )
    assert found.out.count("\n") == 2


def _key_once_it_ended(perdure: Program, run_id: str) -> str:
    """Have a run carried out and what it asks approved; return the key of its one call."""
    while perdure("runs", "wait", run_id, *HERE).code == ExitCode.WAITING_FOR_HUMAN:
        for asked in perdure("interrupts", "list", "--run", run_id, "--json").json["items"]:
            perdure("interrupts", "resolve", asked["interrupt_id"], "--approve")
    events = perdure("runs", "events", run_id, "--json").json
    (key,) = [event["data"]["effect_key"] for event in events if event["type"] == "action"]
    return key
