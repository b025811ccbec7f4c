"""Writes that survive a crash: a reader sees the whole of it or nothing."""

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_beside(path: Path) -> Generator[Path]:
    """Give a free path on the same disk as `path`, in a hidden folder that goes away afterwards.

    A crash leaves the hidden folder behind, under a name made by `scratch_pattern`.
    """
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder) / path.name


def scratch_pattern(path: Path) -> str:
    """Return the glob pattern of the hidden folders made for `path`, relative to its folder."""
    return f".{path.name}.*.tmp"


def sync(path: Path) -> None:
    """Put the content of a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and put it on the disk; a crash may leave a part of it."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def put_in_place(scratch: Path, path: Path) -> None:
    """Give a finished file or folder its name in one step that is on the disk when this returns.

    A file replaces what was there; a folder does not: OSError if `path` is a filled folder.
    """
    sync(scratch)
    scratch.replace(path)
    sync(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in one step; after a crash it has the earlier content or all of this one."""
    with scratch_beside(path) as scratch:
        write_synced(scratch, data)
        put_in_place(scratch, path)
