"""The program as a fixture."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.program import Program, opened


@pytest.fixture
def perdure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Program]:
    """Return the program in an empty folder."""
    yield from opened(tmp_path, monkeypatch, capsys)
