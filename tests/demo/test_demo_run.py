"""The main job from end to end, offline: the figures, the approval, the effect, the crashes."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from perdure.demo.publish import executions, publications
from perdure.demo.sample import write_sample
from tests.cli.program import Program
from tests.demo.independent import falling

KEYS = ["artifact", "error", "products", "publications", "publish_executions", "run_id", "state"]


def expected(folder: Path, region: str) -> list[dict[str, str]]:
    """Return what an independent computation finds in the sample."""
    path = folder / "expected.csv"
    write_sample(path)
    return [asdict(product) for product in falling(path, region)]


@pytest.mark.parametrize("region", ["Germany", "France", "United Kingdom"])
def test_the_figures_equal_an_independent_computation(perdure: Program, region: str) -> None:
    done = perdure("demo", "--yes", "--json", "--region", region)
    assert done.code == 0
    assert list(done.json) == KEYS
    assert done.json["products"] == expected(perdure.folder, region)
    assert (done.json["state"], done.json["publications"]) == ("succeeded", 1)
    assert (done.json["publish_executions"], done.json["error"]) == (1, None)


def test_a_second_demo_publishes_once_more_and_no_more(perdure: Program) -> None:
    first = perdure("demo", "--yes", "--json").json
    second = perdure("demo", "--yes", "--json").json
    assert first["run_id"] != second["run_id"]
    assert second["publications"] == second["publish_executions"] == 1
    folder = perdure.folder / "published"
    assert (len(publications(folder)), executions(folder)) == (2, 2)


def test_the_timeline_is_on_stderr_and_the_table_on_stdout(perdure: Program) -> None:
    done = perdure("demo", "--yes")
    assert "call falling_products" in done.err
    assert done.out.startswith("STOCK_CODE")
    assert "\x1b" not in done.out + done.err


def test_without_input_the_run_is_left_waiting_and_can_be_answered(perdure: Program) -> None:
    done = perdure("demo", "--no-input", "--json")
    assert (done.code, done.json["state"], done.json["publications"]) == (3, "waiting_human", 0)
    found = re.search(r"interrupts resolve (int_\w+) --approve --db (\S+)", done.err)
    assert found is not None
    answered = perdure("interrupts", "resolve", found[1], "--reject", "--db", found[2])
    assert answered.code == 0
    shown = perdure("runs", "show", done.json["run_id"], "--db", found[2], "--json").json
    assert shown["error"]["code"] == "APPROVAL_REJECTED"


def test_an_unknown_region_fails_the_run_and_says_why(perdure: Program) -> None:
    done = perdure("demo", "--yes", "--json", "--region", "Atlantis")
    assert (done.code, done.json["state"], done.json["products"]) == (1, "failed", [])
    assert done.json["error"]["code"] == "TOOL_ERROR"
    assert "unknown region 'Atlantis'" in done.json["error"]["reason"]
    assert "unknown region 'Atlantis'; known: France" in done.err
    assert "state failed: TOOL_ERROR" in done.err


def test_where_nothing_can_be_typed_the_run_is_left_waiting(perdure: Program) -> None:
    """As with `make demo </dev/null`: how to answer is said, and nobody waits for ever."""
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        perdure.patch.setattr(sys, "stdin", nothing)
        done = perdure("demo", "--json")
    assert (done.code, done.json["state"]) == (3, "waiting_human")
    assert re.search(r"interrupts resolve int_\w+ --approve", done.err)
    assert "worker --agents perdure.demo.agent:registry" in done.err


def test_a_model_without_key_is_refused_at_once(perdure: Program) -> None:
    perdure.patch.delenv("OPENAI_API_KEY", raising=False)
    done = perdure("demo", "--yes", "--model", "any")
    assert (done.code, done.out) == (2, "")
    assert "OPENAI_API_KEY" in done.err


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("typed", "code", "state"), [(b"what\ny\n", 0, "succeeded"), (b"n too soon\n", 1, "failed")]
)
def test_the_answer_is_typed_at_the_terminal(
    perdure: Program, typed: bytes, code: int, state: str
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "perdure.cli.main", "demo", "--json"],
        cwd=perdure.folder,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    assert process.stderr is not None
    assert process.stdout is not None
    for line in process.stderr:
        if "from another terminal" in line:
            break
    os.write(ours, typed)
    rest = threading.Thread(target=process.stderr.read)
    rest.start()
    document = json.loads(process.stdout.read())
    assert (process.wait(timeout=30), document["state"]) == (code, state)
    rest.join()
    process.stdout.close()
    process.stderr.close()
    os.close(ours)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_killed_twice_it_publishes_once_and_repeats_nothing_committed(perdure: Program) -> None:
    done = perdure("demo", "--yes", "--json", "--crash")
    assert done.code == 0
    assert done.json["products"] == expected(perdure.folder, "Germany")
    assert (done.json["state"], done.json["publications"]) == ("succeeded", 1)
    assert done.err.count("killed (SIGKILL)") == 2
    assert "committed results produced again: 0" in done.err
    assert len(publications(perdure.folder / "published")) == 1
    assert perdure("verify", "--db", "sqlite:///.perdure/demo/perdure.db").code == 0


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_drill_that_waits_for_a_person_proves_nothing_yet(perdure: Program) -> None:
    """R-19.9: it ends with 3, as every command whose run waits."""
    done = perdure("demo", "--no-input", "--json", "--crash")
    assert (done.code, done.json["state"]) == (3, "waiting_human")
    assert "What the ledger says" not in done.err
