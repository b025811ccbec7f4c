"""The errors a caller can meet, each with a code that never changes.

PerdureError
├── Malformed            `malformed`            400  the caller sent something unreadable
├── Unauthenticated      `unauthenticated`      401  the caller must say who it is
├── Forbidden            `forbidden`            403  the caller lacks the right
├── NotFound             `not_found`            404  no such object for this tenant
├── TooSlow              `too_slow`             408  the request did not arrive in time
├── Conflict             `conflict`             409  the object's state forbids it
│   ├── IdempotencyMismatch `idempotency_mismatch`  the key was used with another body
│   ├── AlreadyAnswered  `already_answered`          the interrupt or call has another answer
│   ├── ThreadBusy       `thread_busy`               the thread has an active run
│   └── HistoryReset     `history_reset`             the cursor is beyond the log
├── Gone                 `gone`                 410  expired, cancelled or deleted
├── TooLarge             `too_large`            413  over a documented limit
├── UnsupportedMedia     `unsupported_media`    415  not a media type the route reads
├── Invalid              `invalid`              422  readable, but against the schema or a rule
├── QuotaExceeded        `quota_exceeded`       429  try again later
├── Unreadable           `unreadable`           500  what is stored is damaged
├── Unavailable          `unavailable`          503  the store cannot answer at the moment
└── StoreFull            `store_full`           507  the store has no room

Bindings map codes to their wire, never classes or messages.
"""

from collections.abc import Mapping
from typing import ClassVar


class PerdureError(Exception):
    """An error with a stable code. `field` is a JSON pointer into what the caller sent."""

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.details = dict(details or {})


class Malformed(PerdureError):
    """The caller sent bytes, an id or a cursor that cannot be read; the caller can mend it."""

    code = "malformed"


class Unauthenticated(PerdureError):
    """The caller's credential is missing or unknown; the caller can mend it."""

    code = "unauthenticated"


class Forbidden(PerdureError):
    """The caller may not do this; an administrator can mend it."""

    code = "forbidden"


class NotFound(PerdureError):
    """There is no such object in the caller's tenant."""

    code = "not_found"


class Conflict(PerdureError):
    """The object's present state forbids the request; the caller must look again."""

    code = "conflict"


class IdempotencyMismatch(Conflict):
    """The idempotency key belongs to a request with another body; details name the run."""

    code = "idempotency_mismatch"


class AlreadyAnswered(Conflict):
    """The interrupt or call was answered otherwise; details show what stands."""

    code = "already_answered"


class ThreadBusy(Conflict):
    """The thread has an active run and the request asked to be rejected then."""

    code = "thread_busy"


class HistoryReset(Conflict):
    """The cursor lies beyond the end of the log: the client followed another history."""

    code = "history_reset"


class Gone(PerdureError):
    """The object expired, was cancelled or deleted."""

    code = "gone"


class TooSlow(PerdureError):
    """The request was not whole in time; the caller can send it again."""

    code = "too_slow"


class TooLarge(PerdureError):
    """What was sent is over a documented limit."""

    code = "too_large"


class UnsupportedMedia(PerdureError):
    """The body's media type is not one that the route reads."""

    code = "unsupported_media"


class Invalid(PerdureError):
    """What was sent can be read but breaks a schema or rule; the caller can mend it."""

    code = "invalid"


class QuotaExceeded(PerdureError):
    """A limit on use is reached; the same request may succeed later."""

    code = "quota_exceeded"


class Unreadable(PerdureError):
    """What is stored cannot be read; an operator can mend it, `perdure verify` says where."""

    code = "unreadable"


class Unavailable(PerdureError):
    """The store cannot answer at the moment; the same request may succeed later."""

    code = "unavailable"


class StoreFull(PerdureError):
    """The store has no room; an operator can mend it."""

    code = "store_full"
