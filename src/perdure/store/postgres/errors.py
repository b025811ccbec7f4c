"""The one place where the driver's errors become ours.

`trouble_of` tells what may be done about an error; `translate` tells the caller what is left when
nothing helped. Whatever is not known to be harmless counts as a lost connection: the outcome of
the statement is then unknown, and the caller sends it again (every write is safe to repeat).
"""

from enum import StrEnum

import asyncpg

from perdure.protocol.errors import PerdureError, StoreFull, Unavailable
from perdure.store.postgres.driver import Unreached


class Trouble(StrEnum):
    """What to do about an error of the driver."""

    LOST = "lost"
    """The connection is gone or useless, the outcome unknown: connect again, send again."""
    AGAIN = "again"
    """The server rolled back for reasons that pass: send the whole transaction again."""
    STALE_PLAN = "stale_plan"
    """A prepared statement no longer fits the schema: connect again, once."""
    DATA = "data"
    """The data cannot be stored: sending it again is useless."""
    FULL = "full"
    """There is no room."""
    LOCKED = "locked"
    """A row or a table stayed locked by somebody else, as long as this connection waits."""
    BUG = "bug"
    """The statement is wrong, or what it reads is damaged: sending it again is useless."""


class DataRefused(Exception):
    """The data of a statement cannot be stored (decision 7)."""


class StillBusy(Exception):
    """Somebody else has a row locked, and this connection does not wait for it."""


_AGAIN = {"40001", "40P01", "57014", "40003"}
_LOCKED = {"55P03"}
_FULL = {"53100", "53200", "58030"}
_LOST = {"57P01", "57P02", "57P03", "57P05", "25006", "53300", "25P02", "25P03", "25P04"}
_LOST_CLASSES = {"08", "28", "3D", "58", "XX"}
"""No connection, no right to one, no such database, trouble of the system, trouble of the server:
all of them may pass, and none tells what became of the statement."""
_DAMAGED = {"XX001", "XX002"}
_DATA_CLASSES = {"22", "23", "54"}


def trouble_of(error: BaseException) -> Trouble | None:
    """Return what kind of trouble an error is; None when it is none of the driver's."""
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return Trouble.STALE_PLAN
    if isinstance(error, asyncpg.PostgresError):
        return _of_sqlstate(str(error.sqlstate or ""))
    if isinstance(error, asyncpg.DataError | OverflowError | UnicodeError):
        return Trouble.DATA
    if isinstance(error, asyncpg.InterfaceError | OSError | TimeoutError | EOFError):
        return Trouble.LOST
    if isinstance(error, asyncpg.InternalClientError):
        return Trouble.LOST
    return None


def _of_sqlstate(state: str) -> Trouble:
    if state in _AGAIN:
        return Trouble.AGAIN
    if state in _LOCKED:
        return Trouble.LOCKED
    if state in _FULL:
        return Trouble.FULL
    if state in _DAMAGED:
        return Trouble.BUG
    if state in _LOST or state[:2] in _LOST_CLASSES:
        return Trouble.LOST
    if state[:2] in _DATA_CLASSES:
        return Trouble.DATA
    return Trouble.BUG


def constraint_of(error: BaseException) -> str:
    """Return the name of the constraint that an error is about, or nothing."""
    cause = error.__cause__ if isinstance(error, DataRefused) else error
    return str(getattr(cause, "constraint_name", None) or "")


def refuse(error: BaseException) -> DataRefused:
    """Return the refusal that stands for a data error, without the data itself."""
    column = getattr(error, "column_name", None)
    constraint = getattr(error, "constraint_name", None)
    where = constraint or column
    message = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return DataRefused(f"{message} ({where})" if where else message)


_REFUSED_ENTRY = (
    asyncpg.InvalidCatalogNameError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InsufficientPrivilegeError,
)


def refusal_of(error: BaseException) -> str | None:
    """Return the server's own words when it lets us not in, or not do what we may not."""
    if not isinstance(error, _REFUSED_ENTRY):
        return None
    return (str(error).splitlines() or [""])[0][:300]


def is_outage(error: BaseException) -> bool:
    """Tell whether an error of ours says that nothing can be written, whatever it may be."""
    return isinstance(error, StoreFull) or (
        isinstance(error, Unavailable)
        and error.__cause__ is not None
        and trouble_of(error.__cause__) is Trouble.LOST
    )


def is_damage(error: BaseException) -> bool:
    """Tell whether an error of ours says that something stored is damaged, or has no value here."""
    state = getattr(error.__cause__, "sqlstate", None)
    return isinstance(error, DataRefused) or state in _DAMAGED


def translate(error: BaseException) -> PerdureError:
    """Return the error a caller sees when nothing helped."""
    if trouble_of(error) is Trouble.FULL:
        return StoreFull("the database has no room")
    if isinstance(error, Unreached):
        return Unavailable(
            f"no PostgreSQL answers at {error.place} ({type(error.__cause__).__name__}): start it, "
            "or name another database with --db or PERDURE_DB__URL"
        )
    name = type(error).__name__
    if refused := refusal_of(error):  # waiting would not help
        return Unavailable(f"PostgreSQL refuses: {refused} ({name})")
    return Unavailable(f"the database cannot answer at the moment ({name})")
