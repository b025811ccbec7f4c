"""Schemathesis for minutes against a running server, on SQLite and on PostgreSQL (A9).

`python -m tests.server.fuzz --minutes 5 --store sqlite --store postgres` (`make fuzz`). All checks
of Schemathesis but one (`EXCLUDED`); event streams as JSON, waits capped (`fuzz_hooks`). The
server's `perdure verify` must find nothing afterwards. The exit code is not 0 after a finding.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from perdure.ops.local_postgres import local_postgres
from tests.server.fuzz_hooks import IDS_VARIABLE
from tests.server.refusals import REFUSALS
from tests.server.world import World, open_world

STORES = ("sqlite", "postgres")
EXCLUDED = "positive_data_acceptance"
"""A request that fits its schema may be refused by a rule beyond it, such as an opaque cursor."""


def main() -> int:
    """Run the fuzzer on each store; return 1 when it found something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--store", action="append", choices=STORES)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    codes = [anyio.run(_fuzz, store, given.minutes, given.seed) for store in given.store or STORES]
    return int(any(codes))


async def _fuzz(store: str, minutes: float, seed: int | None) -> int:
    with _database(store) as url:
        async with open_world(serve=True, url=url) as world:
            ids = await objects_of(world)
            sys.stderr.write(f"\nSchemathesis on {store} for {minutes:g} minutes\n")
            return await anyio.to_thread.run_sync(_run, world.port, ids, minutes, seed)


@contextmanager
def _database(store: str) -> Generator[str]:
    if store == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield str(Path(folder) / "perdure.db")
    else:
        with local_postgres() as server:
            yield server.create_database("fuzz")


async def objects_of(world: World) -> dict[str, str]:
    """Make objects of each kind; return their ids by the name of their path parameter."""
    run = await world.start("echo", {"times": 2}, wait=5)
    asked = await world.start("publisher", {}, wait=1)
    thread = await world.get(f"/v1/threads/{run['thread_id']}/messages")
    path = f"/v1/runs/{run['run_id']}"

    async def first(name: str, key: str) -> str:
        return (await world.get(f"{path}/{name}"))["items"][0][key]

    return {
        "agent_id": "echo",
        "run_id": run["run_id"],
        "thread_id": run["thread_id"],
        "message_id": thread["items"][0]["message_id"],
        "event_id": f"evt_{run['run_id'][4:]}_1",
        "step_id": await first("steps", "step_id"),
        "tool_call_id": await first("tool_calls", "tool_call_id"),
        "checkpoint_id": await first("checkpoints", "checkpoint_id"),
        "interrupt_id": asked["open_interrupts"][0],
    }


def _run(port: int, ids: dict[str, str], minutes: float, seed: int | None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "schemathesis.toml"
        statuses = json.dumps(REFUSALS)
        config.write_text(
            f"[checks.negative_data_rejection]\nexpected-statuses = {statuses}\n", encoding="utf-8"
        )
        return _run_with(config, port, ids, minutes, seed)


def _run_with(
    config: Path, port: int, ids: dict[str, str], minutes: float, seed: int | None
) -> int:
    seconds = minutes * 60
    command = [
        str(Path(sys.executable).with_name("st")),
        f"--config-file={config}",
        "run",
        f"http://127.0.0.1:{port}/openapi.json",
        f"--max-time={seconds:g}",
        "--max-examples=1000000",
        "--checks=all",
        f"--exclude-checks={EXCLUDED}",
        "--continue-on-failure",
        "--request-timeout=20",
        "--suppress-health-check=all",
        "--warnings=off",
        "--no-color",
    ]
    if seed is not None:
        command.append(f"--seed={seed}")
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.server.fuzz_hooks",
        IDS_VARIABLE: json.dumps(ids),
    }
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
