"""Stopping a process with SIGSTOP, but not inside a transaction: that would stop everybody.

A process that stands still with a lock in its hand is the one thing that is documented as blocking
the others (decision 40), so scenes about leases stop their processes between two writes.
"""

import signal
import sqlite3
from collections.abc import Callable

import anyio
import anyio.to_thread
import asyncpg

DISTURBED = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What a probe may end with while the database is disturbed too."""
STUCK_S = 0.5
"""How long a probe waits for a lock before it says that a stopped process holds it."""

_IN_TRANSACTION = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND state LIKE 'idle in transaction%'
"""


async def stop_between_writes(url: str, send: Callable[[signal.Signals], None]) -> None:
    """Send SIGSTOP, and take it back as long as the process holds a lock of the database.

    Each time it is given longer to end its transaction: a machine may be too busy for less.
    """
    pause_s = 0.01
    while True:
        send(signal.SIGSTOP)
        if not await holds_a_lock(url):
            return
        send(signal.SIGCONT)
        await anyio.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)


async def holds_a_lock(url: str) -> bool:
    """Tell whether somebody keeps a transaction open for as long as a probe waits."""
    if url.startswith("sqlite:///"):
        return await anyio.to_thread.run_sync(_sqlite_is_locked, url.removeprefix("sqlite:///"))
    connection = await asyncpg.connect(url)
    try:
        with anyio.move_on_after(STUCK_S):
            while await connection.fetchval(_IN_TRANSACTION):  # noqa: ASYNC110  # a probe
                await anyio.sleep(0.02)
            return False
        return True
    finally:
        connection.terminate()  # a probe that was given up may still be on its way


def _sqlite_is_locked(path: str) -> bool:
    connection = sqlite3.connect(path, timeout=STUCK_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return True
    finally:
        connection.close()
    return False
