"""A zoo of tools whose hanging ones are let go at the end of each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.testing.tools import ToolZoo


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[ToolZoo]:
    with ToolZoo(tmp_path / "journal") as zoo:
        yield zoo
