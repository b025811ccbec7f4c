"""What is true of SQLite alone: one file, several processes, a disk that fills, a writer thread."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from perdure.protocol.errors import StoreFull, Unavailable, Unreadable
from perdure.signals.local import PolledSignals
from perdure.store.commits import Committed
from perdure.store.migrate import Migration, SchemaRefused, make_migration
from perdure.store.reader import RunFilter
from perdure.store.requests import NewBlob, NewRun
from perdure.store.sqlite import SqliteDatabase
from perdure.store.sqlite.admission import insert_run
from perdure.store.sqlite.connection import begin_immediate, check_version, connect
from perdure.store.sqlite.files import NetworkFile, filesystem_of, refuse_network_file
from perdure.store.sqlite.schema import (
    bring_up_to_date,
    known_migrations,
    migrate,
    split_script,
)
from perdure.store.sqlite.transaction import Transaction
from perdure.store.sqlite.writer import WATCH_S
from perdure.testing.builders import (
    TO_SUCCEEDED,
    claimed,
    commit_of,
    lease_of,
    look,
    new_run,
    note,
    write,
)

PROCESS = Path(__file__).with_name("sqlite_process.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file stands."""
    return tmp_path / "perdure.db"


def start(mode: str, path: Path, count: int) -> "subprocess.Popen[str]":
    """Start a process on the file."""
    command = [sys.executable, str(PROCESS), mode, str(path), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def answer_of(process: "subprocess.Popen[str]") -> str:
    """Return what a process printed; it must have ended well and silently."""
    out, err = await anyio.to_thread.run_sync(process.communicate)
    assert (process.returncode, err) == (0, "")
    return out


# ---------------------------------------------------------------- several processes


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_four_processes_claim_each_run_once(path: Path) -> None:
    """R-12.1, DUP-10."""
    async with SqliteDatabase(path) as database:
        async with anyio.create_task_group() as tasks:
            for _ in range(500):
                tasks.start_soon(database.store.insert_run, new_run())
        processes = [start("claim", path, 500) for _ in range(4)]
        answers = [json.loads(await answer_of(process)) for process in processes]
    claims = [run_id for answer in answers for run_id in answer]
    assert len(claims) == 500
    assert len(set(claims)) == 500


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_workers_and_an_api_on_one_file_never_see_it_locked(path: Path) -> None:
    """CON-10, F20: four workers and one who creates; no error, every run ends."""
    async with SqliteDatabase(path) as database:
        processes = [start("work", path, 200) for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(database.store.insert_run, new_run())
        carried = [json.loads(await answer_of(process)) for process in processes]
        backlog = await database.reader.backlog()
    assert sum(carried) == 200
    assert backlog.runs_by_state == {}


async def test_a_process_killed_before_its_commit_leaves_nothing_half(path: Path) -> None:
    async with SqliteDatabase(path) as database:
        rows = [(await database.store.insert_run(new_run())).row for _ in range(3)]
        process = start("die", path, 3)
        out, err = await anyio.to_thread.run_sync(process.communicate)
        assert (process.returncode, out, err) == (9, "", "")
        for row in rows:
            found = await look(database.reader, row.facts.run_id)
            events = await database.reader.events_after(row.facts.run_id, 0, limit=10)
            assert [event.type for event in events] == ["state", "attempt"]
            assert found.hot.last_seq == 2
            await write(database.store, commit_of(found, note()))


async def test_commits_by_other_processes_ring_and_own_ones_do_not(path: Path) -> None:
    async with (
        SqliteDatabase(path) as mine,
        SqliteDatabase(path) as other,
        PolledSignals(mine.foreign_version) as signals,
        signals.subscribe("anything") as bell,
    ):
        with anyio.fail_after(30):
            await bell.wait()  # the first look
            await other.store.insert_run(new_run())
            await bell.wait()
        await mine.store.insert_run(new_run())
        with anyio.move_on_after(4 * WATCH_S) as quiet:
            await bell.wait()
        assert quiet.cancelled_caught


async def test_a_file_that_stays_locked_is_unavailable_and_works_afterwards(path: Path) -> None:
    async with SqliteDatabase(path) as database:
        await hasten(database)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable):
            await database.store.insert_run(new_run())
        assert (await database.reader.backlog()).ready == 0
        other.execute("ROLLBACK")
        other.close()
        assert (await database.store.insert_run(new_run())).created


async def hasten(database: SqliteDatabase) -> None:
    """Give the writer almost no patience."""
    database.writer.busy_deadline_s = 0.05
    await database.writer.run(lambda tx: tx.db.execute("PRAGMA busy_timeout = 10").fetchall())


# ---------------------------------------------------------------- the writer thread


async def blocked(database: SqliteDatabase, gate: threading.Event) -> "asyncio.Task[bool]":
    """Keep the thread busy with a job until the gate opens."""
    entered = threading.Event()

    def wait(tx: Transaction) -> bool:
        entered.set()
        return gate.wait(10)

    task: asyncio.Task[bool] = asyncio.ensure_future(database.writer.run(wait))
    await anyio.to_thread.run_sync(entered.wait)
    return task


async def test_what_waits_is_written_in_one_transaction(path: Path) -> None:
    gate, counted = threading.Event(), list[int]()
    async with SqliteDatabase(path) as database:
        first = await blocked(database, gate)
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(database.store.insert_run, new_run())
            await anyio.wait_all_tasks_blocked()
            database.writer.before_commit = lambda _: counted.append(1)
            gate.set()
        await first
    assert len(counted) == 2


async def test_a_job_that_raises_one_of_our_errors_leaves_nothing_in_the_batch(path: Path) -> None:
    """Decision 7: also when it had written something; what travelled with it is written."""
    gate, kept = threading.Event(), new_run()

    def half_done(tx: Transaction) -> None:
        insert_run(tx, new_run())
        raise Unreadable("in the middle")

    async with SqliteDatabase(path) as database:
        first = await blocked(database, gate)
        async with anyio.create_task_group() as tasks:

            async def fail() -> None:
                with pytest.raises(Unreadable):
                    await database.writer.run(half_done)

            tasks.start_soon(fail)
            tasks.start_soon(database.store.insert_run, kept)
            await anyio.wait_all_tasks_blocked()
            gate.set()
        await first
        runs = await database.reader.list_runs(None, RunFilter(), after=None, limit=9)
    assert [row.facts.run_id for row in runs] == [kept.run_id]


async def test_a_bug_that_one_job_meets_fails_no_other(path: Path) -> None:
    """Decision 7: what waits beside it is written all the same."""
    gate = threading.Event()

    def broken(tx: Transaction) -> None:
        tx.run("delete_ready", b"")
        raise AssertionError("a bug")

    async with SqliteDatabase(path) as database:
        row, kept = (await claimed(database.store)).row, new_run()
        first = await blocked(database, gate)
        results: list[object] = []

        async def fail() -> None:
            with pytest.raises(AssertionError):
                await database.writer.run(broken)

        async def send() -> None:
            results.extend(await database.store.commit([commit_of(row, note())]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            tasks.start_soon(send)
            tasks.start_soon(database.store.insert_run, kept)
            await anyio.wait_all_tasks_blocked()
            gate.set()
        await first
        assert [type(result) for result in results] == [Committed]
        assert await database.reader.find_run(None, kept.run_id) is not None


async def test_lease_renewals_go_before_all_that_waits(path: Path) -> None:
    gate, order = threading.Event(), list[str]()
    async with SqliteDatabase(path) as database:
        held = await claimed(database.store)
        first = await blocked(database, gate)

        async def insert(new: NewRun) -> None:
            await database.store.insert_run(new)
            order.append("insert")

        async def renew() -> None:
            [answer] = await database.store.renew_leases("worker-a", [lease_of(held)], 30)
            assert answer.held
            order.append("renew")

        async with anyio.create_task_group() as tasks:
            for _ in range(300):
                tasks.start_soon(insert, new_run())
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(renew)
            await anyio.wait_all_tasks_blocked()
            gate.set()
        await first
    assert order[0] == "renew"


async def test_one_poisoned_commit_does_not_harm_its_batch(path: Path) -> None:
    gate = threading.Event()
    async with SqliteDatabase(path) as database:
        rows = [(await claimed(database.store)).row for _ in range(20)]
        commits = [commit_of(row, note()) for row in rows]
        bad = commits[7].events[0]
        object.__setattr__(bad, "step_index", 2**70)
        first = await blocked(database, gate)
        results: dict[int, object] = {}

        async def send(place: int) -> None:
            [results[place]] = await database.store.commit([commits[place]])

        async with anyio.create_task_group() as tasks:
            for place in range(20):
                tasks.start_soon(send, place)
            await anyio.wait_all_tasks_blocked()
            gate.set()
        await first
        written = [place for place in range(20) if isinstance(results[place], Committed)]
        assert written == [place for place in range(20) if place != 7]
        assert (await look(database.reader, rows[7].facts.run_id)).hot.last_seq == 2


async def test_a_caller_that_left_does_not_disturb_the_others(path: Path) -> None:
    gate = threading.Event()
    async with SqliteDatabase(path) as database:
        first = await blocked(database, gate)
        with anyio.move_on_after(0.01):
            await database.store.insert_run(new_run())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(database.store.insert_run, new_run())
            await anyio.wait_all_tasks_blocked()
            gate.set()
        await first
        assert (await database.reader.backlog()).ready == 2


async def test_a_database_that_was_left_is_unavailable(path: Path) -> None:
    async with SqliteDatabase(path) as database:
        await database.reader.ping()
    for call in (database.reader.ping(), database.store.requeue_expired(1)):
        with pytest.raises(Unavailable):
            await call


# ---------------------------------------------------------------- no room


async def test_a_full_disk_is_told_and_what_fits_is_written_afterwards(path: Path) -> None:
    """F19."""

    def room(pages: int) -> Callable[[Transaction], None]:
        def allow(tx: Transaction) -> None:
            used = tx.db.execute("PRAGMA page_count").fetchone()[0]
            tx.db.execute(f"PRAGMA max_page_count = {used + pages}").fetchall()

        return allow

    async with SqliteDatabase(path) as database:
        held = await claimed(database.store)
        await database.writer.run(room(8))
        blob = NewBlob(digest="a" * 64, media_type="text/plain", data=bytes(200_000))
        with pytest.raises(StoreFull):
            await database.store.insert_run(new_run(blobs=(blob,)))
        assert await database.reader.read_blob("default", "a" * 64) is None
        await write(database.store, commit_of(held.row, note()))
        await database.writer.run(room(1_000))
        assert (await database.store.insert_run(new_run(blobs=(blob,)))).created
        assert await database.reader.read_blob("default", "a" * 64) == blob.data


# ---------------------------------------------------------------- finality in SQL


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE run_state SET state = 'planning', finished_at = NULL",
        "UPDATE run_state SET state = 'failed'",
        "UPDATE run_state SET code = 'INTERNAL'",
        "UPDATE run_state SET lease_owner = 'me', lease_expires_at = 9",
        "UPDATE run_state SET last_seq = last_seq - 1",
        "UPDATE run_state SET state = 'sleeping'",
        "UPDATE events SET data = x'7b7d'",
    ],
)
async def test_the_file_itself_refuses_to_change_an_ended_run(path: Path, change: str) -> None:
    """R-2.2."""
    async with SqliteDatabase(path) as database:
        held = await claimed(database.store)
        await write(database.store, commit_of(held.row, path=TO_SUCCEEDED))
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(change)
    connection.close()


# ---------------------------------------------------------------- at the door


async def opened(path: Path, migrations: list[Migration]) -> None:
    """Open the file with the migrations of another release."""
    async with SqliteDatabase(path, migrations=migrations):
        pass


async def test_a_newer_release_migrates_and_an_older_one_refuses_to_start(path: Path) -> None:
    known = list(known_migrations())
    newer = make_migration(len(known) + 1, "more", "ALTER TABLE runs ADD COLUMN more TEXT;")
    await opened(path, known)
    await opened(path, [*known, newer])
    with pytest.raises(SchemaRefused) as refusal:
        await opened(path, known)
    assert f"version {len(known) + 1}" in str(refusal.value)
    assert f"version {len(known)}:" in str(refusal.value)


async def test_who_waits_for_a_migration_waits_bounded_and_then_starts(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SCH-06: longer than any write waits for the file; said in the log; open only afterwards."""
    monkeypatch.setattr("perdure.store.sqlite.connection.BUSY_MS", 20)
    monkeypatch.setattr("perdure.store.sqlite.connection.BUSY_DEADLINE_S", 0.02)
    other = connect(path)
    begin_immediate(other)
    known = known_migrations()
    with closing(connect(path)) as mine, pytest.raises(sqlite3.OperationalError):
        bring_up_to_date(mine, known, 0, wait_s=0.05)
    assert caplog.text.count("waiting for another process") == 1
    started = anyio.Event()

    async def start_worker() -> None:
        async with SqliteDatabase(path) as database:
            await database.reader.ping()
            started.set()

    caplog.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(start_worker)
        while not caplog.text:  # noqa: ASYNC110  # the log has no event
            await anyio.sleep(0.005)
        migrate(other, known, 0)
        assert not started.is_set()
        other.execute("COMMIT")
        with anyio.fail_after(30):
            await started.wait()
    begin_immediate(other)
    async with SqliteDatabase(path) as database:  # what lacks nothing waits for nobody
        await database.reader.ping()
        other.close()


async def test_a_migration_with_another_text_is_refused(path: Path) -> None:
    await opened(path, list(known_migrations()))
    other = make_migration(1, "core", known_migrations()[0].sql + "\n-- changed\n")
    with pytest.raises(SchemaRefused, match="another text"):
        await opened(path, [other, *known_migrations()[1:]])


async def test_a_migration_that_fails_leaves_nothing(path: Path) -> None:
    known = list(known_migrations())
    bad = make_migration(len(known) + 1, "bad", "CREATE TABLE a (b TEXT);\nCREATE TABLE a (b);")
    with pytest.raises(Unavailable):
        await opened(path, [*known, bad])
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    connection.close()
    await opened(path, known)


async def test_a_schema_that_changed_under_a_process_fails_its_ping(path: Path) -> None:
    async with SqliteDatabase(path) as database:
        connection = sqlite3.connect(path, isolation_level=None)
        newer = len(known_migrations()) + 1
        connection.execute("INSERT INTO schema_migrations VALUES (?, 'more', 'x', 0)", (newer,))
        connection.close()
        with pytest.raises(Unavailable):
            await database.reader.ping()


async def test_a_file_that_is_no_database_is_unavailable(path: Path) -> None:
    await anyio.Path(path).write_bytes(
        b"this is not a database, and it is long enough to see that" * 20
    )
    with pytest.raises(Unavailable):
        await opened(path, list(known_migrations()))


async def test_a_folder_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await opened(tmp_path / "no" / "perdure.db", list(known_migrations()))


def test_a_trigger_is_one_statement_of_a_script() -> None:
    trigger = "CREATE TRIGGER t BEFORE UPDATE ON a\nBEGIN\n    SELECT 1;\nEND;\n"
    found = list(split_script(f"-- about a\nCREATE TABLE a (b TEXT);\n{trigger}-- the end\n"))
    assert found == ["-- about a\nCREATE TABLE a (b TEXT);\n", trigger]


def test_an_old_sqlite_is_refused() -> None:
    check_version()
    with pytest.raises(Unavailable, match=r"3\.36\.0 is too old"):
        check_version((3, 36, 0))


MOUNTS = """\
/dev/sda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/local\\040disk xfs rw 0 0
host:/x /mnt/far fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/perdure.db", "ext4"),
        ("/home/perdure.db", "nfs4"),
        ("/homes/perdure.db", "ext4"),
        ("/home/local disk/perdure.db", "xfs"),
        ("/mnt/far/perdure.db", "fuse.sshfs"),
    ],
)
def test_the_nearest_mount_tells_the_file_system(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind


def test_a_network_file_system_is_refused(tmp_path: Path) -> None:
    """F20."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/x {tmp_path} nfs rw 0 0\n", encoding="utf-8")
    with pytest.raises(NetworkFile, match="nfs"):
        refuse_network_file(tmp_path / "perdure.db", mounts)
