"""The statements of this dialect, by name."""

from importlib.resources import files

from perdure.store.sqlfiles import load_statements

SQL = load_statements(files("perdure.store.postgres") / "sql")
