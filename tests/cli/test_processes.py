"""Workers and servers are processes that end in order when they are asked to."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.cli.shop import REFERENCE

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "perdure.cli.main")


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start a command in a folder; the tests' own agents can be imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PERDURE_LOG__LEVEL": "warning"}
    return subprocess.Popen(
        [*PROGRAM, *words],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def first_document(process: "subprocess.Popen[str]") -> dict[str, object]:
    """Return the document that a long command prints once it works."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("}"):
            break
    return json.loads(text)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_worker_carries_out_runs_and_drains(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """R-12.4, R-12.5."""
    worker = start(tmp_path, "worker", "--agents", REFERENCE, "--json")
    document = first_document(worker)
    assert document["agents"] == [
        "echo",
        "fails",
        "asks",
        "ships",
        "pays",
        "ships_much",
        "hangs",
        "keeps",
    ]
    assert document["queues"] == ["default"]
    assert worker.stderr is not None
    assert "serves echo 1, fails 1, " in (line := worker.stderr.readline())
    assert line.endswith(" from the queue default\n")
    run = start(tmp_path, "run", "echo", "--input", "7", "--wait", "--json")
    out, _ = run.communicate(timeout=30)
    assert (run.returncode, json.loads(out)["answer"]) == (0, 7)
    worker.send_signal(number)
    _, err = worker.communicate(timeout=30)
    assert (worker.returncode, err) == (code, "")


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_worker_full_of_tools_that_never_return_starts_afresh(tmp_path: Path) -> None:
    worker = start(tmp_path, "worker", "--agents", REFERENCE, "--json")
    first = first_document(worker)
    assert worker.stderr is not None
    worker.stderr.readline()
    start(tmp_path, "run", "hangs").communicate(timeout=30)
    second = first_document(worker)
    assert second["worker_id"] != first["worker_id"]
    worker.terminate()
    worker.communicate(timeout=30)
    assert worker.returncode == 143


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_server_answers_and_stops_with_an_idle_subscriber(tmp_path: Path) -> None:
    words = ("serve", "--port", "0", "--agents", REFERENCE, "--json")
    server = start(tmp_path, *words)
    url = str(first_document(server)["url"])
    body = json.dumps({"input": None}).encode()
    request = urllib.request.Request(  # noqa: S310  # a URL of ours
        f"{url}/v1/agents/asks/run", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310  # a URL of ours
        run_id = json.load(answer)["run_id"]
    stream = urllib.request.Request(  # noqa: S310  # a URL of ours
        f"{url}/v1/runs/{run_id}/events", headers={"Accept": "text/event-stream"}
    )
    with urllib.request.urlopen(stream) as events:  # noqa: S310  # a URL of ours
        assert events.readline()
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=30)
    assert (server.returncode, "Traceback" in err) == (143, False)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    process = start(tmp_path, "config", "show")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.wait(timeout=30)
    process.stderr.close()
    assert "Traceback" not in err
