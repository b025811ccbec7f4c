"""Migrations as data, the same for each dialect: which files there are, and which are to be run.

Files are `0001_name.sql`, numbered from 1 without gaps, forward only, additive first. A file that
was applied never changes again: its checksum is kept with it. The planning is pure; the adapters
run the plan in one transaction under a lock.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from perdure.protocol.errors import Unavailable

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")


class BadMigration(ValueError):
    """The files of the code are wrong: numbered with a gap, or twice. Its author can mend it."""


class SchemaRefused(Unavailable):
    """The database's schema is not one this code may work on; an operator can mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One file of the code."""

    version: int
    name: str
    sql: str
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """One row of a database's `schema_migrations`."""

    version: int
    name: str
    checksum: str


def read_migrations(folder: Traversable) -> tuple[Migration, ...]:
    """Return the numbered files of `folder` in order; raise BadMigration for a gap or a double."""
    found: list[Migration] = []
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        parts = _FILE.fullmatch(file.name)
        if parts is not None:
            found.append(make_migration(int(parts[1]), parts[2], file.read_text("utf-8")))
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise BadMigration("migrations are not numbered 1, 2, 3, … without a gap")
    return tuple(found)


def make_migration(version: int, name: str, sql: str) -> Migration:
    """Return a migration with its checksum, which does not depend on the kind of line end."""
    text = sql.replace("\r\n", "\n")
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return Migration(version=version, name=name, sql=text, checksum=checksum)


def plan_migrations(
    known: Sequence[Migration], applied: Sequence[Applied], *, ahead_max: int = 0
) -> list[Migration]:
    """Return what is to be run, in order; raise SchemaRefused when this code must not start.

    Refused are a database that is more than `ahead_max` versions newer than the code (the
    compatibility window), one whose rows have a gap, and one where a migration had another text.
    """
    newest = max((row.version for row in applied), default=0)
    code = max((migration.version for migration in known), default=0)
    if newest > code + ahead_max:
        raise SchemaRefused(
            f"the database has schema version {newest}, this code knows version {code}: "
            "start a release that knows it",
            details={"database": newest, "code": code},
        )
    by_version = {row.version: row for row in applied}
    if sorted(by_version) != list(range(1, newest + 1)):
        raise SchemaRefused("the database's list of migrations has a gap")
    for migration in known:
        row = by_version.get(migration.version)
        if row is not None and row.checksum != migration.checksum:
            raise SchemaRefused(
                f"migration {migration.version} ({row.name}) was applied with another text "
                f"than this code has (checksum {row.checksum[:12]}, here {migration.checksum[:12]})"
            )
    return [migration for migration in known if migration.version not in by_version]
