"""Signals through PostgreSQL: lossy, coalesced, and back by themselves."""

import anyio
import asyncpg
import pytest

from perdure.signals.postgres import CHANNEL, PostgresSignals, payload_of

pytestmark = pytest.mark.timeout(30)


async def test_a_signal_reaches_another_process(postgres_dsn: str) -> None:
    """R-12.5."""
    async with (
        PostgresSignals(postgres_dsn) as here,
        PostgresSignals(postgres_dsn) as there,
        there.subscribe("run:1") as wakeup,
    ):
        here.publish("run:1")
        with anyio.fail_after(30):
            await wakeup.wait()


async def test_the_own_subscribers_are_woken_at_once(postgres_dsn: str) -> None:
    async with PostgresSignals(postgres_dsn) as signals, signals.subscribe("queue") as wakeup:
        signals.publish("queue")
        with anyio.fail_after(30):
            await wakeup.wait()


async def test_signals_of_one_moment_travel_once(postgres_dsn: str) -> None:
    heard: list[object] = []
    both = anyio.Event()

    def listen(_connection: object, _pid: int, _channel: str, payload: object) -> None:
        heard.append(payload)
        if len(heard) >= 2:
            both.set()

    listener = await asyncpg.connect(postgres_dsn)
    await listener.add_listener(CHANNEL, listen)
    async with PostgresSignals(postgres_dsn) as signals:
        for _ in range(500):
            signals.publish("a")
            signals.publish("b")
        with anyio.fail_after(30):
            await both.wait()
    await listener.close()
    assert sorted(map(str, heard)) == ["a", "b"]


async def test_a_lost_connection_comes_back_and_wakes_everybody(postgres_dsn: str) -> None:
    """R-12.2, R-6.6."""
    async with PostgresSignals(postgres_dsn) as signals, signals.subscribe("quiet") as wakeup:
        killer = await asyncpg.connect(postgres_dsn)
        await killer.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'perdure signals'"
        )
        await killer.close()
        with anyio.fail_after(30):
            await wakeup.wait()


class _Numbered(PostgresSignals):
    """Signals whose numbers are told: the server gives them, and nobody can ask for one."""

    @property
    def number(self) -> int:
        """That of the own sending connection."""
        return self._sender_pid

    def hear(self, number: int, payload: str) -> None:
        """Hear a signal as if a connection of this number had sent it."""
        self._heard(None, number, CHANNEL, payload)


async def test_a_sender_that_lost_its_connection_hears_whoever_gets_its_number(
    postgres_dsn: str,
) -> None:
    """R-12.5: after a restart the server gives the same numbers again, to other processes."""
    async with _Numbered(postgres_dsn) as signals:
        killer = await asyncpg.connect(postgres_dsn)
        pid = 0
        with anyio.fail_after(30):
            while not pid:
                signals.publish("queue")
                await anyio.sleep(0.05)
                pid = signals.number
            await killer.execute("SELECT pg_terminate_backend($1)", pid)
            while signals.number == pid:  # noqa: ASYNC110  # nothing is sent meanwhile
                await anyio.sleep(0.05)
        await killer.close()
        async with signals.subscribe("queue") as wakeup:
            signals.hear(pid, "queue")
            with anyio.fail_after(5):
                await wakeup.wait()


async def test_a_database_that_is_away_does_not_keep_a_process_from_starting() -> None:
    with anyio.fail_after(30):
        async with PostgresSignals("postgresql://postgres@127.0.0.1:1/none") as signals:
            signals.publish("queue")


def test_a_long_topic_travels_as_its_digest() -> None:
    assert payload_of("run:1") == "run:1"
    assert len(payload_of("x" * 9000)) == 65
    assert payload_of("a\0b").startswith("#")
