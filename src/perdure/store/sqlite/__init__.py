"""The SQLite adapter: one file, one writer thread, readers beside it."""

from perdure.store.sqlite.database import SqliteDatabase

__all__ = ["SqliteDatabase"]
