"""The fixture for tests on SQLite: a copy of one migrated file, which is quicker than migrating."""

import shutil
from pathlib import Path

import anyio
import pytest

from perdure.store.sqlite import SqliteDatabase


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a migrated database that nobody writes to."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"

    async def migrate() -> None:
        async with SqliteDatabase(path):
            pass

    anyio.run(migrate)
    return path


@pytest.fixture
def sqlite_path(tmp_path: Path, sqlite_template: Path) -> Path:
    """The file of an empty, migrated database."""
    return shutil.copyfile(sqlite_template, tmp_path / "perdure.db")
