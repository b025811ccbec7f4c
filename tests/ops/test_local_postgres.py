"""The throwaway PostgreSQL serves, restarts, and leaves nothing behind however its caller ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from perdure.ops import local_postgres as module
from perdure.ops.local_postgres import LocalPostgres, local_postgres
from perdure.protocol.errors import Invalid, Unavailable

pytestmark = pytest.mark.slow

CALLER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from perdure.ops.local_postgres import local_postgres
with local_postgres() as server:
    print(json.dumps({"pid": server.pid, "folder": str(server.data_dir.parent)}), flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Child:
    """Another process that runs a server, and what it leaves if nobody tidies up."""

    process: subprocess.Popen[str]
    postmaster: int
    folder: Path

    def left_nothing(self) -> bool:
        return not Path(f"/proc/{self.postmaster}").exists() and not self.folder.exists()


def comes_true(condition: Callable[[], bool], *, within_s: float = 45) -> bool:
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True


def start_child(command: list[str], cwd: Path | None = None) -> Child:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd
    )
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    return Child(process, told["pid"], Path(told["folder"]))


@pytest.fixture
def child() -> Iterator[Child]:
    child = start_child([sys.executable, "-c", CALLER])
    with child.process:
        yield child
        child.process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[LocalPostgres]:
    with local_postgres(settings={"work_mem": "5MB"}) as server:
        yield server


async def ask(dsn: str, question: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(question)
    finally:
        connection.terminate()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_server_is_gone_with_its_folder_after_its_caller_was_killed(
    child: Child, end: signal.Signals
) -> None:
    assert child.folder.exists()
    child.process.send_signal(end)
    child.process.wait(45)
    assert comes_true(child.left_nothing)


def test_a_server_is_gone_with_its_folder_after_the_block() -> None:
    with local_postgres() as server:
        pid, folder = server.pid, server.data_dir.parent
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()


async def test_a_created_database_takes_connections_and_a_dropped_one_does_not(
    server: LocalPostgres,
) -> None:
    dsn = server.create_database("orders")
    assert await ask(dsn, "select current_database()") == "orders"
    with pytest.raises(Unavailable, match="already exists"):
        server.create_database("orders")
    server.drop_database("orders")
    server.drop_database("orders")
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await ask(dsn, "select 1")


def test_a_database_name_cannot_carry_sql(server: LocalPostgres) -> None:
    with pytest.raises(Invalid):
        server.create_database('x"; drop database postgres; --')


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_keeps_the_address_and_what_was_committed(
    server: LocalPostgres, mode: module.StopMode
) -> None:
    dsn = server.create_database(f"kept_{mode}")
    await ask(dsn, "create table t as select 42 as n")
    before = server.pid
    server.restart(mode)
    assert server.pid != before
    assert await ask(dsn, "select n from t") == 42
    server.drop_database(f"kept_{mode}")


async def test_the_server_is_durable_and_keeps_to_this_machine(server: LocalPostgres) -> None:
    assert await ask(server.dsn, "show fsync") == "on"
    assert await ask(server.dsn, "show listen_addresses") == "127.0.0.1"
    assert await ask(server.dsn, "show work_mem") == "5MB"
    assert server.port < 32_768
    over_socket = f"postgresql://postgres@/postgres?host={server.socket_dir}&port={server.port}"
    assert await ask(over_socket, "select 1") == 1


def test_a_setting_that_postgresql_refuses_is_reported_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o711)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with (
        pytest.raises(Unavailable, match="shared_buffers"),
        local_postgres(settings={"shared_buffers": "plenty"}),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_missing_programs_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.PROGRAMS_VARIABLE, str(tmp_path))
    with pytest.raises(Unavailable, match=module.PROGRAMS_VARIABLE), local_postgres():
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server as another user")
def test_programs_that_the_servers_user_cannot_read_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    package = module.find_programs().parents[1]
    libraries = package.with_name(package.name + ".libs")
    if not libraries.is_dir():
        pytest.skip("needs the programs of the wheel")
    shutil.copytree(package, site / package.name)
    shutil.copytree(libraries, site / libraries.name)
    site.chmod(0o700)
    programs = site / package.name / "pginstall" / "bin"
    monkeypatch.setenv(module.PROGRAMS_VARIABLE, str(programs))
    with local_postgres() as server:
        assert Path(f"/proc/{server.pid}/exe").resolve().is_relative_to(server.data_dir.parent)
