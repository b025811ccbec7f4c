"""Reads by key that travel together: who comes meanwhile, who is cancelled, and what fails."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import asyncpg
import pytest
from anyio.lowlevel import checkpoint

from perdure.protocol.errors import Unavailable, Unreadable
from perdure.protocol.ids import uuid_of
from perdure.store.postgres import PostgresDatabase
from perdure.store.postgres import together as travelling
from perdure.store.postgres.errors import DataRefused, refuse, translate
from perdure.store.postgres.together import GROUP_MAX, Together
from perdure.testing import builders as make


class Table:
    """Rows by key, which are read when somebody says so."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self.asked = list[list[str]]()
        self.error: Exception | None = None
        self.damaged: tuple[str, Exception] | None = None
        """A row's key, and what the driver says when it is read."""
        self.doors = [anyio.Event() for _ in range(9)]

    async def load(self, keys: Sequence[str]) -> dict[str, Any]:
        """Read the rows as they are when the door is opened."""
        self.asked.append(list(keys))
        await self.doors[len(self.asked) - 1].wait()
        if self.error is not None:
            raise self.error
        if self.damaged is not None and self.damaged[0] in keys:
            is_data = isinstance(self.damaged[1], OverflowError)
            raise (refuse if is_data else translate)(self.damaged[1]) from self.damaged[1]
        return {key: self.rows[key] for key in keys if key in self.rows}

    async def was_asked(self, times: int) -> None:
        """Return once so many reads have begun."""
        while len(self.asked) < times:
            await checkpoint()

    def open(self, *doors: int) -> None:
        """Let these reads end."""
        for door in doors:
            self.doors[door].set()


async def _settled() -> None:
    for _ in range(5):
        await checkpoint()


async def test_those_who_come_while_one_reads_are_read_for_together() -> None:
    table, found = Table(), dict[str, Any]()
    together = Together(table.load)

    async def find(key: str) -> None:
        found[key] = await together.find(key)

    table.rows = {"a": 1, "b": 2, "c": 3}
    async with anyio.create_task_group() as group:
        group.start_soon(find, "a")
        await table.was_asked(1)
        for key in ("b", "c", "nobody"):
            group.start_soon(find, key)
        await _settled()
        assert table.asked == [["a"]]
        table.rows["b"] = "newer"
        table.open(0)
        await table.was_asked(2)
        assert found == {"a": 1}
        table.open(1)
    assert table.asked == [["a"], ["b", "c", "nobody"]]
    assert found == {"a": 1, "b": "newer", "c": 3, "nobody": None}


async def test_a_read_that_has_begun_is_not_an_answer_for_who_comes_later() -> None:
    """It may have seen the row before a commit that the caller knows of."""
    table = Table()
    together = Together(table.load)
    async with anyio.create_task_group() as group:
        group.start_soon(together.find, "a")
        await table.was_asked(1)
        group.start_soon(together.find, "a")
        table.open(0, 1)
    assert table.asked == [["a"], ["a"]]


async def test_who_reads_for_others_and_is_cancelled_leaves_it_to_those_who_still_wait() -> None:
    table, found = Table(), dict[str, Any]()
    together = Together(table.load)
    scopes = {key: anyio.CancelScope() for key in "abcd"}

    async def find(key: str) -> None:
        with scopes[key]:
            found[key] = await together.find(key)

    table.rows = dict.fromkeys("abcd", 1)
    async with anyio.create_task_group() as group:
        group.start_soon(find, "a")
        await table.was_asked(1)
        for key in "bcd":
            group.start_soon(find, key)
        await _settled()
        table.open(0)
        await table.was_asked(2)
        scopes["c"].cancel()
        await _settled()
        scopes["b"].cancel()
        await table.was_asked(3)
        table.open(2)
    assert table.asked == [["a"], ["b", "c", "d"], ["d"]]
    assert found == {"a": 1, "d": 1}


async def test_who_waits_and_is_cancelled_is_read_for_no_more() -> None:
    table = Table()
    together = Together(table.load)
    async with anyio.create_task_group() as group:
        group.start_soon(together.find, "a")
        await table.was_asked(1)
        with anyio.move_on_after(0):
            await together.find("b")
        group.start_soon(together.find, "c")
        table.open(0, 1)
    assert table.asked == [["a"], ["c"]]


async def _tell(together: Together, key: str, told: list[str]) -> None:
    """Look for a row, and note the key when the database was away."""
    try:
        await together.find(key)
    except Unavailable:
        told.append(key)


async def test_what_fails_is_told_to_each_and_keeps_nobody_after_them() -> None:
    table, told = Table(), list[str]()
    together = Together(table.load)
    async with anyio.create_task_group() as group:
        group.start_soon(_tell, together, "a", told)
        await table.was_asked(1)
        for number in range(GROUP_MAX + 1):
            group.start_soon(_tell, together, str(number), told)
        await _settled()
        table.error = Unavailable("away")
        table.open(0, 1)
        await table.was_asked(3)
        table.error = None
        table.open(2)
    assert [len(keys) for keys in table.asked] == [1, GROUP_MAX, 1]
    assert sorted(told) == sorted(["a", *map(str, range(GROUP_MAX))])
    table.error = Unavailable("away")
    table.open(3)
    with pytest.raises(Unavailable):
        await together.find("b")


async def test_a_row_that_cannot_be_read_fails_alone() -> None:
    """F21: its damage is an error of the whole statement."""
    table, found, told = Table(), dict[str, Any](), list[str]()
    together = Together(table.load)

    async def find(key: str) -> None:
        try:
            found[key] = await together.find(key)
        except (Unavailable, DataRefused):
            told.append(key)

    for damage in (asyncpg.DataCorruptedError("a page"), OverflowError("a time")):
        table.rows, table.damaged = {"a": 1, "b": 2, "c": 3}, ("b", damage)
        async with anyio.create_task_group() as group:
            table.open(*range(len(table.doors)))
            for key in "abc":
                group.start_soon(find, key)
    assert (found, told) == ({"a": 1, "c": 3}, ["b", "b"])


async def test_an_outage_is_told_to_all_who_have_waited_as_long() -> None:
    """Else each group would wait for the database in its turn, and the last one for minutes."""
    table, told = Table(), list[str]()
    together = Together(table.load)
    table.error = Unavailable("away")
    table.error.__cause__ = ConnectionRefusedError()
    async with anyio.create_task_group() as group:
        group.start_soon(_tell, together, "a", told)
        await table.was_asked(1)
        for number in range(3 * GROUP_MAX):
            group.start_soon(_tell, together, str(number), told)
        await _settled()
        table.open(0)
        await table.was_asked(2)
        group.start_soon(_tell, together, "late", told)
        await _settled()
        table.open(1)
        await table.was_asked(3)
        assert len(told) == 1 + 3 * GROUP_MAX
        assert table.asked[2] == ["late"]
        table.open(2)


async def test_a_run_whose_row_is_damaged_hides_no_other(postgres_dsn: str) -> None:
    """F21: a time that no calendar of ours has."""
    async with PostgresDatabase(postgres_dsn) as database:
        runs = [(await database.store.insert_run(make.new_run())).row.facts.run_id for _ in "abc"]
        connection = await asyncpg.connect(postgres_dsn)
        query = "UPDATE run_state SET updated_at = '20000-01-01' WHERE run_id = $1"
        await connection.execute(query, uuid_of(runs[1]))
        await connection.close()
        found = list[str]()

        async def find(run_id: str) -> None:
            with suppress(Unreadable):
                row = await database.reader.find_run(None, run_id)
                assert row is not None
                found.append(row.facts.run_id)

        async with anyio.create_task_group() as group:
            for run_id in (*runs, *runs):
                group.start_soon(find, run_id)
    assert sorted(found) == sorted([runs[0], runs[2]] * 2)


async def test_a_read_that_stays_without_an_answer_keeps_only_its_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is dead, and nobody knows for half a minute."""
    monkeypatch.setattr(travelling, "OVERDUE_S", 0)
    table, found = Table(), dict[str, Any]()
    together = Together(table.load)

    async def find(name: str, key: str) -> None:
        found[name] = await together.find(key)

    table.rows = {"a": 1, "b": 2, "c": 3}
    async with anyio.create_task_group() as group:
        for key in "abc":
            group.start_soon(find, key, key)
        await table.was_asked(3)  # the last one is overdue as well
        assert table.asked[0] == ["a"]
        assert table.asked[1] == ["b", "c"]
        assert table.asked[2] == ["c"]
        table.open(1)
        await _settled()
        assert found == {"b": 2}
        group.start_soon(find, "later", "a")
        table.open(3)
        await table.was_asked(4)
        await _settled()
        assert found == {"b": 2, "later": 1}
        table.open(0, 2)
    assert found == {"a": 1, "b": 2, "c": 3, "later": 1}


@pytest.mark.parametrize("ends", ["cancelled", "fails"])
async def test_a_late_reader_that_goes_away_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(travelling, "OVERDUE_S", 0)
    table, found = Table(), dict[str, Any]()
    together = Together(table.load)
    reading = anyio.CancelScope()

    async def find(key: str) -> None:
        try:
            found[key] = await together.find(key)
        except Unavailable:
            found[key] = "away"

    async def read_first() -> None:
        with reading:
            await find("a")

    table.rows = {"a": 1, "b": 2}
    async with anyio.create_task_group() as group:
        group.start_soon(read_first)
        await table.was_asked(1)
        group.start_soon(find, "b")
        await table.was_asked(2)
        if ends == "cancelled":
            reading.cancel()
        else:
            table.error = Unavailable("away")
            table.open(0)
        await _settled()
        table.error = None
        table.open(1)
    assert found == ({"b": 2} if ends == "cancelled" else {"a": "away", "b": 2})
    assert [list(keys) for keys in table.asked] == [["a"], ["b"]]
