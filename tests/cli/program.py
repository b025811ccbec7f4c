"""Runs the program in this process, as a shell would: words in, streams and exit code out."""

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import main


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return the one document on stdout."""
        return json.loads(self.out)


class Program:
    """The program in a folder of its own, without settings from outside."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, streams: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self.patch = patch
        self._streams = streams

    def __call__(self, *words: str) -> Done:
        """Run a command."""
        self.patch.setattr(sys, "argv", ["perdure", *words])
        self._streams.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        seen = self._streams.readouterr()
        code = ended.value.code
        return Done(int(code or 0), seen.out, seen.err)


def opened(
    folder: Path, patch: pytest.MonkeyPatch, streams: pytest.CaptureFixture[str]
) -> Iterator[Program]:
    """Yield the program; afterwards logging is what it was."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    patch.chdir(folder)
    patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    for name in ("PERDURE_DB__URL", "PERDURE_AGENTS", "NO_COLOR"):
        patch.delenv(name, raising=False)
    yield Program(folder, patch, streams)
    root.handlers[:], root.level = before
