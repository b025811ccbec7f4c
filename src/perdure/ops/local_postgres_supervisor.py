"""Owns one throwaway PostgreSQL for as long as its standard input stays open.

Started by `perdure.ops.local_postgres` in a session of its own, so neither Ctrl-C nor the caller's
death reaches it before the end of its input does. Whatever ends it, it stops the server and deletes
the folder. It needs the standard library only: it runs as a file, isolated from the caller's paths.

Input: lines `restart fast` or `restart immediate`. Output: one JSON object for the start and for
each line, either with `pid`, `port`, `data_dir` and `socket_dir` or with `error`.
"""

import argparse
import json
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypedDict

START_S = 60.0
STOP_FAST_S = 10.0
STOP_IMMEDIATE_S = 7.0
POLL_S = 0.01
PORT_FIRST = 20_000
PORT_END = 32_768  # outgoing connections take their ports from here on
PORT_TRIES_MAX = 5
LOG_TAIL_CHARS = 2_000
SOCKET_PATH_BYTES_MAX = 100

DEFAULTS = {
    "listen_addresses": "127.0.0.1",
    "dynamic_shared_memory_type": "mmap",  # lives in the data folder, so it goes with it
    "timezone": "UTC",
    "log_timezone": "UTC",
}
STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class Identity(TypedDict, total=False):
    """The `subprocess` arguments that make a child another user; empty for the same user."""

    user: int
    group: int
    extra_groups: list[int]


class StartFailed(Exception):
    """PostgreSQL did not come up; the message ends with the tail of its log."""


def unprivileged() -> Identity:
    """Return whom to run PostgreSQL as: it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise StartFailed("PostgreSQL does not run as root, and there is no user postgres or nobody")


def succeeds(command: Sequence[str], identity: Identity) -> bool:
    """Say whether the command runs well as that user."""
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            command,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            **identity,
        )
    except OSError:
        return False
    return done.returncode == 0


def make_folder(identity: Identity) -> Path:
    """Make a folder that the server's user reaches and whose socket paths are short enough."""
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):  # noqa: S108  # a private folder is made below it
        if len(os.fsencode(parent)) > SOCKET_PATH_BYTES_MAX // 2:
            continue
        if not succeeds(["/bin/sh", "-c", 'cd "$1"', "sh", parent], identity):
            continue
        folder = Path(tempfile.mkdtemp(prefix="perdure-pg-", dir=parent))
        os.chown(folder, identity.get("user", -1), identity.get("group", -1))  # -1 changes nothing
        return folder
    raise StartFailed("found no temporary folder that PostgreSQL's user can reach")


def reachable_programs(bin_dir: Path, folder: Path, identity: Identity) -> Path:
    """Return a folder with the programs that the server's user can run, a copy if need be."""
    if all(
        succeeds([str(bin_dir / name), "--version"], identity) for name in ("initdb", "postgres")
    ):
        return bin_dir
    prefix = bin_dir.parent
    target = folder / "programs" / prefix.parent.name / prefix.name
    shutil.copytree(prefix, target, ignore=shutil.ignore_patterns("include"))
    # A wheel keeps its shared libraries beside the package, and the programs find them from there.
    libraries = prefix.parent.with_name(prefix.parent.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target.parent.with_name(libraries.name))
    for path in (folder / "programs", *(folder / "programs").rglob("*")):
        executable = path.is_dir() or path.stat().st_mode & 0o100
        path.chmod(0o755 if executable else 0o644)
    copied = target / bin_dir.name
    if not succeeds([str(copied / "postgres"), "--version"], identity):
        raise StartFailed(f"{bin_dir / 'postgres'} does not run")
    return copied


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


class Server:
    """One data folder and at most one running postmaster on it."""

    def __init__(self, folder: Path, bin_dir: Path, identity: Identity) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.log = folder / "postgres.log"
        self.port = 0
        self._bin_dir = bin_dir
        self._identity = identity
        self._process: subprocess.Popen[bytes] | None = None
        self._env = {"PATH": os.defpath, "LANG": "C", "LC_ALL": "C", "HOME": str(folder)}

    def create(self, settings: Mapping[str, str]) -> None:
        """Make the data folder. A given setting wins over our own."""
        command = [
            str(self._bin_dir / "initdb"),
            "--pgdata",
            str(self.data_dir),
            "--username=postgres",
        ]
        command += ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        with self.log.open("ab") as log:
            done = subprocess.run(  # noqa: S603 - our own command
                command,
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
                **self._identity,
            )
        if done.returncode != 0:
            raise StartFailed(f"initdb failed:\n{self._log_tail()}")
        chosen = DEFAULTS | {"unix_socket_directories": str(self.folder)} | dict(settings)
        with (self.data_dir / "postgresql.conf").open("a", encoding="utf-8") as conf:
            for name, value in chosen.items():
                conf.write(f"{name} = '{value.replace(chr(39), chr(39) * 2)}'\n")

    def start_on_free_port(self) -> None:
        """Start on some free port; another program may take a port between look and use."""
        for attempt in range(1, PORT_TRIES_MAX + 1):
            self.port = PORT_FIRST + secrets.randbelow(PORT_END - PORT_FIRST)
            try:
                self.start()
            except StartFailed as error:
                if attempt == PORT_TRIES_MAX or "Address already in use" not in str(error):
                    raise
            else:
                return

    def start(self) -> None:
        """Start the postmaster and return when it takes connections."""
        command = [str(self._bin_dir / "postgres"), "-D", str(self.data_dir), "-p", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._identity,
            )
        process = self._process
        if not wait_until(lambda: process.poll() is not None or self._is_ready(), START_S):
            self.stop("fast")
            raise StartFailed(f"PostgreSQL was not ready in {START_S:.0f} s:\n{self._log_tail()}")
        if process.poll() is not None:
            self._process = None
            raise StartFailed(f"PostgreSQL did not start:\n{self._log_tail()}")

    def stop(self, mode: str) -> None:
        """Stop the postmaster, harder and harder."""
        process, self._process = self._process, None
        if process is None:
            return
        steps = [(STOP_SIGNALS["immediate"], STOP_IMMEDIATE_S), (signal.SIGKILL, STOP_IMMEDIATE_S)]
        if mode == "fast":
            steps.insert(0, (STOP_SIGNALS["fast"], STOP_FAST_S))
        for number, seconds in steps:
            process.send_signal(number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            return

    def describe(self) -> dict[str, str | int]:
        """Return what the caller must know to connect."""
        assert self._process is not None
        return {
            "pid": self._process.pid,
            "port": self.port,
            "data_dir": str(self.data_dir),
            "socket_dir": str(self.folder),
        }

    def _is_ready(self) -> bool:
        """Read the state that the postmaster writes into line 8 of its pid file.

        The first line tells whether the file is this postmaster's or that of a killed one.
        """
        try:
            lines = (self.data_dir / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return False
        mine = self._process is not None and lines[:1] == [str(self._process.pid)]
        return mine and len(lines) >= 8 and lines[7].strip() == "ready"

    def _log_tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]


def reply(message: Mapping[str, str | int]) -> None:
    """Write one answer to the caller."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def serve(server: Server) -> None:
    """Obey lines until the caller closes the pipe, on purpose or by dying."""
    for line in sys.stdin:
        match line.split():
            case ["restart", mode] if mode in STOP_SIGNALS:
                server.stop(mode)
                server.start()
                reply(server.describe())
            case _:
                reply({"error": f"unknown command {line.strip()!r}"})


def remove(folder: Path) -> None:
    """Delete the folder; a child of a killed postmaster may write for a moment longer."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_until(gone, STOP_FAST_S)


def leave(*_: object) -> NoReturn:
    """End at a signal the way the end of input does."""
    raise SystemExit(0)


def parse(arguments: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """Return the programs' folder and the settings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin-dir", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    pairs: list[str] = options.set
    return options.bin_dir, dict(pair.split("=", 1) for pair in pairs)


def main(arguments: Sequence[str]) -> None:
    """Run one server from start to removal."""
    bin_dir, settings = parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder: Path | None = None
    server: Server | None = None
    try:
        identity = unprivileged()
        folder = make_folder(identity)
        server = Server(folder, reachable_programs(bin_dir, folder, identity), identity)
        server.create(settings)
        server.start_on_free_port()
        reply(server.describe())
        serve(server)
    except BrokenPipeError:
        pass  # the caller is gone: what is left to do is below
    except (StartFailed, OSError) as error:
        reply({"error": str(error)})
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if server is not None:
            server.stop("fast")
        if folder is not None:
            remove(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
