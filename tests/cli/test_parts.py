"""What a run consists of, from the command line: the ids that other commands take are listed."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout

import pytest

from perdure.ops.exits import ExitCode
from perdure.ops.output import print_bytes
from perdure.protocol.errors import Invalid
from tests.cli.program import Program
from tests.cli.workshop import REFERENCE

HERE = ("--here", "--agents", REFERENCE, "--json")


def test_checkpoints_attempts_and_artifacts_are_listed_and_read(perdure: Program) -> None:
    """R-7.2, R-5.9: the ids fit `state`, `diff` and `artifact`."""
    run_id = perdure("run", "researcher", *HERE).json["run_id"]
    first = perdure("runs", "checkpoints", run_id, "--limit", "1", "--json").json
    rest = perdure("runs", "checkpoints", run_id, "--after", first["next"], "--json").json["items"]
    newest, oldest = first["items"][0], rest[-1]
    assert newest["seq"] > oldest["seq"]
    assert newest["checkpoint_id"] in perdure("runs", "checkpoints", run_id).out
    assert perdure("runs", "state", newest["checkpoint_id"]).json["run_id"] == run_id
    assert perdure("runs", "diff", oldest["checkpoint_id"], newest["checkpoint_id"]).code == 0

    attempts = perdure("runs", "attempts", run_id, "--json").json["items"]
    assert [item["attempt"] for item in attempts] == list(range(1, len(attempts) + 1))
    assert attempts[0]["worker_id"] in perdure("runs", "attempts", run_id).out

    (made,) = perdure("runs", "artifacts", run_id, "--json").json["items"]
    assert "notes.txt" in perdure("runs", "artifacts", run_id).out
    artifact_id = made["artifact_id"]
    assert perdure("runs", "artifact", artifact_id).out == "notes on A"
    assert perdure("runs", "artifact", artifact_id, "--json").json == made
    there = perdure.folder / "notes.txt"
    assert perdure("runs", "artifact", artifact_id, "--out", str(there)).code == 0
    assert there.read_bytes() == b"notes on A"
    nowhere = str(perdure.folder / "no" / "where")
    assert perdure("runs", "artifact", artifact_id, "--out", nowhere).code == ExitCode.USAGE
    both = perdure("runs", "artifact", artifact_id, "--json", "--out", str(there))
    assert both.code == ExitCode.USAGE
    for rest, command, says in (
        (("artifact", artifact_id), 'exec "$@" >/dev/full', "No space left on device"),
        (("artifact", artifact_id), 'exec "$@" >&-', "stdout is closed"),
        (("list",), 'exec "$@" >/dev/full', "No space left on device"),
        (("list", "--json"), 'exec "$@" >&-', "stdout is closed"),
    ):
        words = [sys.executable, "-m", "perdure.cli.main", "runs", *rest]
        ended = subprocess.run(
            ["/bin/sh", "-c", command, "sh", *words],
            cwd=perdure.folder,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert ended.returncode == ExitCode.USAGE, ended.stderr
        assert says in ended.stderr
        assert "Traceback" not in ended.stderr


def test_content_that_could_steer_a_terminal_is_not_printed_on_one() -> None:
    """R-5.9: what an agent made is printed as it is, but not into a person's terminal."""
    for data, shown in (
        (b"a report\n\twith words\r\n", True),
        ("größer als 3 €".encode(), True),
        (b"\x1b]0;owned\x07", False),
        ("\u202egnp.exe".encode(), False),
        (b"\x89PNG\r\n", False),
    ):
        ours, theirs = os.openpty()
        try:
            with (
                open(theirs, "w", encoding="utf-8", closefd=False) as terminal,
                redirect_stdout(terminal),
            ):
                refused = pytest.raises(Invalid) if not shown else nullcontext()
                with refused:
                    print_bytes(data)
        finally:
            os.close(ours)
            os.close(theirs)


def test_a_wait_ends_when_a_child_waits_for_a_person(perdure: Program) -> None:
    """R-13.5: what is asked below can be answered at once; what is cancelled asks nobody."""
    done = perdure("run", "leaves_to_rests", *HERE)
    assert done.code == ExitCode.WAITING_FOR_HUMAN
    (asked,) = done.json["open_interrupts"]
    assert perdure("interrupts", "resolve", asked, "--approve").code == 0
    again = perdure("runs", "wait", done.json["run_id"], *HERE)
    assert (again.code, again.json["open_interrupts"] != [asked]) == (3, True)
    perdure("runs", "cancel", done.json["run_id"])
    assert perdure("runs", "wait", done.json["run_id"], *HERE).code == ExitCode.RUN_FAILED


def test_the_result_of_a_call_is_told_by_callback(perdure: Program) -> None:
    """R-5.10: the same result again changes nothing, another one is refused."""
    run_id = perdure("run", "mails", "--timeout", "0.5", *HERE).json["run_id"]
    waits = "comes by callback (external reference letter hi)"
    for _ in range(20):  # on a slow machine another command's worker goes on with it
        if waits in perdure("runs", "events", run_id).out:
            break
        perdure("runs", "wait", run_id, "--timeout", "0.5", *HERE)
    assert waits in perdure("runs", "events", run_id).out
    call_id = perdure("runs", "show", run_id).out.split()[-1]
    assert perdure("runs", "callback", call_id).code == ExitCode.USAGE
    told = perdure("runs", "callback", call_id, "--output", '"read"', "--json").json
    assert (told["status"], told["output"]) == ("succeeded", "read")
    assert perdure("runs", "callback", call_id, "--output", '"read"').code == 0
    assert perdure("runs", "callback", call_id, "--failed", "lost").code == ExitCode.CONFLICT


def test_events_that_are_not_kept_are_told(perdure: Program) -> None:
    """R-6.8: the events of a run whose thread was deleted begin with what is missing."""
    run = perdure("run", "researcher", *HERE).json
    assert perdure("threads", "delete", run["thread_id"]).code == 0
    for how in ((), ("--follow",)):
        first, *rest = perdure("runs", "events", run["run_id"], *how).out.splitlines()
        assert "no longer kept" in first
        assert rest
        lines = perdure("runs", "events", run["run_id"], "--jsonl", *how).out.splitlines()
        assert [json.loads(line)["type"] for line in lines] == ["gap", "state"]
