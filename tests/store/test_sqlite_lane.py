"""Short reads share a thread: each has its own answer, and none waits for what it need not."""

import sqlite3
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from perdure.protocol.errors import Unavailable
from perdure.store.sqlite import SqliteDatabase
from perdure.store.sqlite import lane as lanes
from perdure.store.sqlite.connection import connect_reader, translate
from perdure.store.sqlite.lane import Lane
from perdure.testing.builders import new_run


@pytest.fixture
async def lane(tmp_path: Path) -> AsyncGenerator[Lane]:
    """A lane over an empty file."""
    found = Lane(lambda: connect_reader(tmp_path / "perdure.db"))
    yield found
    await anyio.to_thread.run_sync(found.stop)


def number(db: sqlite3.Connection, value: int) -> int:
    """Read a number."""
    return db.execute("SELECT ?", (value,)).fetchall()[0][0]


async def test_each_of_many_has_its_own_answer_from_one_thread(lane: Lane) -> None:
    answers = dict[int, tuple[int, int]]()

    async def read(value: int) -> None:
        answers[value] = await lane.read(lambda db: (number(db, value), threading.get_ident()))

    async with anyio.create_task_group() as group:
        for value in range(300):
            group.start_soon(read, value)
    assert {value: answer for value, (answer, _) in answers.items()} == {
        value: value for value in range(300)
    }
    assert len({thread for _, thread in answers.values()}) == 1


async def test_a_read_that_raises_fails_alone(lane: Lane) -> None:
    answers = list[object]()

    async def read(statement: str) -> None:
        try:
            answers.append(await lane.read(lambda db: db.execute(statement).fetchall()))
        except Unavailable as error:
            answers.append(type(error))

    async with anyio.create_task_group() as group:
        for statement in ("SELECT 1", "SELECT nothing", "SELECT 2"):
            group.start_soon(read, statement)
    assert answers == [[(1,)], Unavailable, [(2,)]]


async def test_those_behind_one_that_found_the_file_busy_do_not_wait_for_it_too(
    lane: Lane,
) -> None:
    go_on = threading.Event()
    tried = list[int]()
    told = list[object]()

    def busy(value: int) -> None:
        tried.append(value)
        if value == 0:
            go_on.wait(30)
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error

    async def read(value: int) -> None:
        try:
            await lane.read(lambda _: busy(value))
        except Unavailable as error:
            told.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(read, 0)  # it holds the thread while the others line up behind it
        for value in (1, 2, 3):
            group.start_soon(read, value)
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert len(told) == 4
    assert tried in ([0], [0, 1])  # the four came as one group, or the first came alone


async def test_an_answer_that_is_due_does_not_wait_for_a_slow_read_behind_it(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "ANSWER_S", 0.0)
    are_behind, is_answered = threading.Event(), threading.Event()
    saw = list[bool]()

    def hold(_: sqlite3.Connection) -> bool:
        return are_behind.wait(5)

    async def quick() -> None:
        await lane.read(lambda db: number(db, 1))
        is_answered.set()

    async def slow() -> None:
        saw.append(await lane.read(lambda _: is_answered.wait(5)))

    async with anyio.create_task_group() as group:
        group.start_soon(lane.read, hold)
        group.start_soon(quick)  # these two come as one group
        group.start_soon(slow)
        await anyio.wait_all_tasks_blocked()
        are_behind.set()
    assert saw == [True]


async def test_whoever_is_cancelled_waits_no_more_and_the_others_are_answered(lane: Lane) -> None:
    may_end = threading.Event()

    def wait(_: sqlite3.Connection) -> bool:
        return may_end.wait(30)

    async with anyio.create_task_group() as group:
        group.start_soon(lane.read, wait)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    may_end.set()
    assert await lane.read(lambda db: number(db, 7)) == 7


async def test_a_database_that_is_closed_answers_what_waits_and_refuses_what_comes(
    tmp_path: Path,
) -> None:
    new = new_run()
    found = list[bool]()
    async with SqliteDatabase(tmp_path / "perdure.db") as database:
        await database.store.insert_run(new)
        reader = database.reader

        async def read() -> None:
            found.append(await reader.find_run(None, new.run_id) is not None)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(read)
    assert found == [True] * 20
    with pytest.raises(Unavailable):
        await reader.find_run(None, new.run_id)


async def test_those_behind_one_that_could_not_connect_to_a_busy_file_do_not_wait_too() -> None:
    go_on = threading.Event()
    tried = list[int]()
    told = list[object]()

    def connect() -> sqlite3.Connection:
        tried.append(len(tried))
        go_on.wait(30)
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise translate(error) from error

    lane = Lane(connect)

    async def read() -> None:
        try:
            await lane.read(lambda db: number(db, 1))
        except Unavailable as error:
            told.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    await anyio.to_thread.run_sync(lane.stop)
    assert (len(told), tried in ([0], [0, 1])) == (4, True)


async def test_a_lane_that_was_stopped_refuses_what_comes(tmp_path: Path) -> None:
    """Nobody would ever answer it: reads of other threads' loops may come at that moment, too."""
    lane = Lane(lambda: connect_reader(tmp_path / "perdure.db"))
    await anyio.to_thread.run_sync(lane.stop)
    with pytest.raises(Unavailable), anyio.fail_after(5):
        await lane.read(lambda db: number(db, 1))
