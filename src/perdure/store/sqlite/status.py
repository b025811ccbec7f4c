"""Looking at a file's schema without opening it for work."""

import sqlite3
from contextlib import closing
from pathlib import Path

from perdure.store.migrate import Applied
from perdure.store.sqlite.connection import translate
from perdure.store.sqlite.schema import known_migrations
from perdure.store.status import SchemaState, schema_state

_HAS_TABLE = "SELECT count(*) FROM sqlite_schema WHERE name = 'schema_migrations'"
_LIST = "SELECT version, name, checksum FROM schema_migrations ORDER BY version"


def read_schema_state(path: Path) -> SchemaState:
    """Return a file's state; a missing file has version 0. Raises Unavailable, SchemaRefused."""
    return schema_state(known_migrations(), _applied(path) if path.exists() else [])


def _applied(path: Path) -> list[Applied]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as found:
            if not found.execute(_HAS_TABLE).fetchone()[0]:
                return []
            rows = found.execute(_LIST).fetchall()
    except sqlite3.Error as error:
        raise translate(error) from error
    return [Applied(version=row[0], name=row[1], checksum=row[2]) for row in rows]
