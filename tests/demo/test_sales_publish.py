"""Publishing: once for each key, also after a crash and with several processes at a time."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.demo.publish import (
    Publication,
    PublishError,
    executions,
    lookup,
    publications,
    publish,
)

NOW = datetime(2011, 11, 28, 9, tzinfo=UTC)
FILES = {"report.md": b"# Report\n", "chart.svg": b"<svg/>\n"}

PROGRAM = """
import os, sys
from datetime import UTC, datetime
from pathlib import Path
from perdure.demo import publish as module

crash_at = sys.argv[2]
if crash_at != "never":
    def crash(*_):
        os._exit(9)
    setattr(module, crash_at, crash)
sys.stdin.readline()
at = datetime(2011, 11, 28, 9, tzinfo=UTC)
print(module.publish(Path(sys.argv[1]), "key", "report", {"report.md": b"text"}, at=at).created)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "published"


def start(folder: Path, crash_at: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), crash_at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def go(program: subprocess.Popen[str]) -> tuple[int, str]:
    with program:
        output, _ = program.communicate("go\n")
    return program.returncode, output.strip()


def test_a_publication_has_its_files_under_its_reference(folder: Path) -> None:
    publication = publish(folder, "key", "germany", FILES, at=NOW)
    assert publication.created
    place = folder / publication.reference
    assert place.name == "germany"
    assert {path.name: path.read_bytes() for path in place.iterdir()} == FILES


def test_the_same_key_publishes_once_and_each_execution_is_counted(folder: Path) -> None:
    first = publish(folder, "key", "germany", FILES, at=NOW)
    second = publish(folder, "key", "france", {"other.md": b"other"}, at=NOW)
    assert (first.created, second.created) == (True, False)
    assert second.reference == first.reference
    assert (len(publications(folder)), executions(folder)) == (1, 2)
    assert not list(folder.rglob("other.md"))


def test_each_key_has_its_own_publication(folder: Path) -> None:
    references = {publish(folder, key, "same", FILES, at=NOW).reference for key in "abc"}
    assert {publication.reference for publication in publications(folder)} == references
    assert len(references) == 3
    assert (executions(folder), executions(folder, "b")) == (3, 1)


def test_lookup_finds_what_was_published_and_nothing_else(folder: Path) -> None:
    assert lookup(folder, "key") is None
    reference = publish(folder, "key", "germany", FILES, at=NOW).reference
    assert lookup(folder, "key") == Publication(reference, False, "key", "germany")
    assert lookup(folder, "other") is None


def test_a_folder_that_does_not_exist_has_no_publications(folder: Path) -> None:
    assert (publications(folder), executions(folder)) == ([], 0)
    assert not folder.exists()


def test_the_journal_tells_key_process_and_time(folder: Path) -> None:
    publish(folder, "key\nwith a line end", "germany", FILES, at=NOW)
    (line,) = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "effect_key": "key\nwith a line end",
        "pid": os.getpid(),
        "at": "2011-11-28T09:00:00+00:00",
    }


def test_a_line_of_the_journal_that_a_crash_cut_short_does_not_swallow_the_next(
    folder: Path,
) -> None:
    publish(folder, "a", "germany", FILES, at=NOW)
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"effect_key": "cut')
    publish(folder, "b", "germany", FILES, at=NOW)
    assert (executions(folder), executions(folder, "b")) == (2, 1)


@pytest.mark.parametrize("crash_at", ["_write_publication", "put_in_place"])
def test_a_crash_before_the_rename_leaves_no_publication(folder: Path, crash_at: str) -> None:
    assert go(start(folder, crash_at)) == (9, "")
    assert (publications(folder), lookup(folder, "key")) == ([], None)
    assert executions(folder, "key") == 1
    assert publish(folder, "key", "report", FILES, at=NOW).created
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_crash_after_the_rename_is_found_by_the_next_execution(folder: Path) -> None:
    # The cleanup is the first thing after the rename.
    assert go(start(folder, "scratch_pattern")) == (9, "")
    assert len(publications(folder)) == 1
    assert not publish(folder, "key", "report", FILES, at=NOW).created
    assert (len(publications(folder)), executions(folder)) == (1, 2)


def test_one_of_several_processes_makes_the_publication(folder: Path) -> None:
    programs = [start(folder, "never") for _ in range(4)]
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    outputs = sorted(program.communicate()[0].strip() for program in programs)
    assert outputs == ["False", "False", "False", "True"]
    assert (len(publications(folder)), executions(folder)) == (1, 4)


def test_an_execution_overtaken_before_its_rename_returns_the_winner(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.demo import publish as module

    write = module._write_publication  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001  # the moment between two writes

    def overtaken(scratch: Path, manifest: dict[str, str], files: dict[str, bytes]) -> None:
        monkeypatch.undo()
        assert publish(folder, "key", "winner", FILES, at=NOW).created
        write(scratch, manifest, files)

    monkeypatch.setattr(module, "_write_publication", overtaken)
    publication = publish(folder, "key", "loser", FILES, at=NOW)
    assert (publication.created, publication.name) == (False, "winner")
    assert not list(folder.rglob("loser"))


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../../etc/passwd", "etc-passwd"),
        ("/absolute", "absolute"),
        ("a..b", "a.b"),
        (".hidden", "hidden"),
        ("a\0b\\c", "a-b-c"),
        ("Week 47: Germany", "Week-47-Germany"),
        ("x" * 200, "x" * 80),
    ],
)
def test_names_cannot_leave_the_folder(folder: Path, name: str, safe: str) -> None:
    publication = publish(folder, "key", name, {name: b"text"}, at=NOW)
    assert publication.name == safe
    assert (folder / publication.reference / safe).read_bytes() == b"text"


@pytest.mark.parametrize(
    ("key", "name", "files"),
    [
        ("", "name", FILES),
        ("key", "", FILES),
        ("key", "..", FILES),
        ("key", "publication.json", FILES),
        ("key", "name", {}),
        ("key", "name", {"../..": b""}),
        ("key", "name", {"a b": b"", "a-b": b""}),
    ],
)
def test_unusable_names_are_refused_before_anything_happens(
    folder: Path, key: str, name: str, files: dict[str, bytes]
) -> None:
    with pytest.raises(PublishError):
        publish(folder, key, name, files, at=NOW)
    assert not folder.exists()


def test_a_disk_error_is_raised_and_leaves_no_publication(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.demo import publish as module

    def full(scratch: Path, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "put_in_place", full)
    with pytest.raises(OSError, match="No space"):
        publish(folder, "key", "report", FILES, at=NOW)
    assert publications(folder) == []
