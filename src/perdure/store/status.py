"""How a database's schema stands to this code, looked at without changing anything."""

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.store.migrate import Applied, Migration, plan_migrations


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaState:
    """The version of a database (0: empty or missing), of this code, and what `upgrade` applies."""

    database_version: int
    code_version: int
    pending: tuple[str, ...]


def schema_state(known: Sequence[Migration], applied: Sequence[Applied]) -> SchemaState:
    """Return the state; raise SchemaRefused for a database this code must not work on."""
    pending = plan_migrations(known, applied)
    return SchemaState(
        database_version=max((row.version for row in applied), default=0),
        code_version=max((migration.version for migration in known), default=0),
        pending=tuple(f"{migration.version:04d}_{migration.name}" for migration in pending),
    )
