"""A pgbouncer in transaction mode before a PostgreSQL server, where one is installed."""

import random
import shutil
import socket
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perdure.ops.local_postgres_supervisor import make_folder, unprivileged, wait_until
from perdure.protocol.errors import Unavailable

START_S = 30.0
_PORT_FIRST, _PORT_LAST = 22_000, 22_999

_CONFIGURATION = """\
[databases]
* = host=127.0.0.1 port={server_port} user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 8
max_client_conn = 200
logfile = {folder}/pgbouncer.log
"""


class Pooler:
    """A pooler that runs on a port of loopback."""

    def __init__(self, program: str, file: Path, port: int) -> None:
        self.port = port
        self._command = [program, str(file)]
        self._process: subprocess.Popen[bytes] | None = None

    def url_of(self, database: str) -> str:
        """Return the URL that leads to a database through the pooler."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}?sslmode=disable"

    def start(self) -> None:
        """Start it and return when it takes connections. Raises Unavailable when it never does."""
        self._process = subprocess.Popen(  # noqa: S603  # the program that was found
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **unprivileged(),
        )
        if not wait_until(lambda: _answers(self.port), START_S):
            raise Unavailable(f"{self._command[0]} takes no connections")

    def stop(self) -> None:
        """End it at once, with all its connections."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """End it at once and start it again."""
        self.stop()
        self.start()


def find_pgbouncer() -> str | None:
    """Return the program, also where only root's path has it; None without one."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/sbin")


@contextmanager
def pgbouncer(server_port: int) -> Generator[Pooler]:
    """Run a pooler before a server of loopback for the length of the `with` block.

    Raises Unavailable where none is installed, or when it does not start.
    """
    program = find_pgbouncer()
    if program is None:
        raise Unavailable("pgbouncer is not installed")
    folder = make_folder(unprivileged())
    port = next(port for port in _ports() if not _answers(port))
    file = folder / "pgbouncer.ini"
    text = _CONFIGURATION.format(server_port=server_port, port=port, folder=folder)
    file.write_text(text, encoding="utf-8")
    file.chmod(0o644)
    pooler = Pooler(program, file, port)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _ports() -> Sequence[int]:
    """Return ports in an order of chance: a pooler that is being restarted keeps its own."""
    return random.SystemRandom().sample(range(_PORT_FIRST, _PORT_LAST), k=_PORT_LAST - _PORT_FIRST)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False
