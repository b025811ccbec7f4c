"""Publishes files into a folder, once for each effect key, whatever happens in between.

A publication is one folder, named after its key, that appears complete and in one step: a crash
leaves it there or not, never half. Any number of processes may publish the same key at a time;
one of them makes the publication and the others find it.

Layout: <folder>/journal.jsonl has a line per execution; <folder>/<hash of the key>/ has
publication.json and a folder with the files. Hidden names are unfinished work.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, cast

from perdure.demo.files import put_in_place, scratch_beside, scratch_pattern, sync, write_synced

JOURNAL_NAME = "journal.jsonl"
MANIFEST_NAME = "publication.json"
NAME_CHARS_MAX = 80
FILES_MAX = 100

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class PublishError(ValueError):
    """The publication cannot be made from these names; whoever chose them can mend it."""

    code: ClassVar[str] = "publish"


@dataclass(frozen=True, slots=True)
class Publication:
    """What was published under a key. `reference` is its path relative to the folder.

    `created` is true only in the answer to the execution that made the publication.
    """

    reference: str
    created: bool
    effect_key: str
    name: str


def publish(
    folder: Path, effect_key: str, name: str, files: Mapping[str, bytes], *, at: datetime
) -> Publication:
    """Publish the files under a name, unless the key has a publication already.

    The first execution of a key decides: later ones change nothing and get the same reference,
    even for other content. Each execution is in the journal before it does anything, with the
    process and the time `at`. Characters of names beyond letters, digits, ".", "_" and "-" become
    "-", runs of dots one dot, and names never begin with a dot. Raises `publish` for an empty key, no files, or names
    that become empty or equal.
    """
    safe_name, safe_files = _checked(effect_key, name, files)
    folder.mkdir(parents=True, exist_ok=True)
    _record_execution(folder, effect_key, at)
    existing = lookup(folder, effect_key)
    if existing is not None:
        return existing
    place = folder / _key_hash(effect_key)
    manifest = {"effect_key": effect_key, "name": safe_name, "published_at": at.isoformat()}
    try:
        with scratch_beside(place) as scratch:
            _write_publication(scratch, manifest, safe_files)
            put_in_place(scratch, place)
    except OSError:
        # Another execution may have been quicker; its publication is the answer then.
        existing = lookup(folder, effect_key)
        if existing is None:
            raise
        return existing
    for leftover in folder.glob(scratch_pattern(place)):
        shutil.rmtree(leftover, ignore_errors=True)
    return Publication(f"{place.name}/{safe_name}", True, effect_key, safe_name)


def lookup(folder: Path, effect_key: str) -> Publication | None:
    """Return the key's publication, or None if it has none."""
    return _find_publication(folder / _key_hash(effect_key))


def publications(folder: Path) -> list[Publication]:
    """Return the complete publications, ordered by reference."""
    if not folder.is_dir():
        return []
    places = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = (_find_publication(place) for place in places)
    return [publication for publication in found if publication is not None]


def executions(folder: Path, effect_key: str | None = None) -> int:
    """Return how many executions the journal has, of one key or of all."""
    keys = list(_executed_keys(folder / JOURNAL_NAME))
    return len(keys) if effect_key is None else keys.count(effect_key)


def _checked(
    effect_key: str, name: str, files: Mapping[str, bytes]
) -> tuple[str, dict[str, bytes]]:
    if not effect_key:
        raise PublishError("the effect key is empty")
    if not 1 <= len(files) <= FILES_MAX:
        raise PublishError(f"a publication has between 1 and {FILES_MAX} files")
    safe_files = {_safe_name(file_name): data for file_name, data in files.items()}
    if len(safe_files) != len(files):
        raise PublishError("two of the files would have the same name")
    return _safe_name(name), safe_files


def _safe_name(name: str) -> str:
    safe = re.sub(r"\.{2,}", ".", _UNSAFE.sub("-", name))
    safe = safe.lstrip(".-")[:NAME_CHARS_MAX].rstrip(".-")
    if not safe or safe == MANIFEST_NAME:
        raise PublishError(f"not a usable name: {name[:NAME_CHARS_MAX]!r}")
    return safe


def _key_hash(effect_key: str) -> str:
    return hashlib.sha256(effect_key.encode()).hexdigest()[:32]


def _write_publication(
    scratch: Path, manifest: Mapping[str, str], files: Mapping[str, bytes]
) -> None:
    content = scratch / manifest["name"]
    content.mkdir(parents=True)
    for file_name, data in files.items():
        write_synced(content / file_name, data)
    sync(content)
    write_synced(scratch / MANIFEST_NAME, json.dumps(manifest).encode() + b"\n")


def _find_publication(place: Path) -> Publication | None:
    try:
        text = (place / MANIFEST_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = cast(dict[str, str], json.loads(text))
    name = manifest["name"]
    return Publication(f"{place.name}/{name}", False, manifest["effect_key"], name)


def _record_execution(folder: Path, effect_key: str, at: datetime) -> None:
    """Append one line in one write, so that lines of several processes never mix."""
    line = json.dumps({"effect_key": effect_key, "pid": os.getpid(), "at": at.isoformat()})
    journal = folder / JOURNAL_NAME
    descriptor = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        # A crash may have cut the last line short; it must not swallow this one.
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (b"\n" if is_cut else b"") + line.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync(folder)


def _executed_keys(journal: Path) -> Iterator[str]:
    if not journal.exists():
        return
    for line in journal.read_bytes().splitlines():
        try:
            entry: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield str(cast(dict[str, Any], entry).get("effect_key", ""))
