"""How values stand in PostgreSQL: ids as bare UUIDs, digests as 32 bytes, free text as UTF-8 bytes.

An event's data is deflated when that saves a tenth: PostgreSQL itself compresses only rows of
more than 2 KB, and most events are smaller. JSON begins with a brace and deflated data with 0x78,
so that either is known when it is read.

A time that is damaged may lie beyond those that Python has. The driver would fail on it, and with it
the whole statement, so it is told as the number that it is, and refused where its row is read.

Free text is text that a caller, a tool or a model makes up: PostgreSQL's `text` refuses U+0000.
"""

import re
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from perdure.protocol.ids import hex_of

DEFLATE_FROM_BYTES = 256
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SINCE: Final = datetime(2000, 1, 1, tzinfo=UTC)
_MICRO: Final = timedelta(microseconds=1)


def digest_out(digest: str) -> bytes:
    """Return the stored form of a digest; what is not 64 hex digits is kept behind zero bytes."""
    if _DIGEST.fullmatch(digest) is not None:
        return bytes.fromhex(digest)
    text = b"\0" + digest.encode()
    return text if len(text) != 32 else b"\0" + text


def digest_in(stored: bytes) -> str:
    """Return the digest of its stored form."""
    return stored.hex() if len(stored) == 32 else stored.lstrip(b"\0").decode()


def digest_out_or_none(digest: str | None) -> bytes | None:
    """Return the stored form of a digest that may be absent."""
    return None if digest is None else digest_out(digest)


def digest_in_or_none(stored: bytes | None) -> str | None:
    """Return a digest that may be absent."""
    return None if stored is None else digest_in(stored)


def data_out(raw: bytes) -> bytes:
    """Return the stored form of an event's data."""
    if len(raw) < DEFLATE_FROM_BYTES:
        return raw
    deflated = zlib.compress(raw, 1)
    return deflated if len(deflated) * 10 < len(raw) * 9 else raw


def data_in(stored: bytes) -> bytes:
    """Return an event's data of its stored form; damaged data as it is, for its reader to refuse."""
    if stored[:1] == b"{":
        return stored
    try:
        return zlib.decompress(stored)
    except zlib.error:
        return stored


def text_out(text: str | None) -> bytes | None:
    """Return the stored form of free text."""
    return None if text is None else text.encode()


def text_in(stored: bytes | None) -> str | None:
    """Return free text that may be absent."""
    return None if stored is None else stored.decode()


def id_out(identifier: str | None) -> str | None:
    """Return the hex digits the driver takes for a UUID."""
    return None if identifier is None else hex_of(identifier)


def id_in(prefix: str, stored: UUID) -> str:
    """Return the id text of a stored UUID."""
    return f"{prefix}_{stored.hex}"


def id_in_or_none(prefix: str, stored: UUID | None) -> str | None:
    """Return the id text of a UUID that may be absent."""
    return None if stored is None else f"{prefix}_{stored.hex}"


def time_to_driver(time: datetime) -> tuple[int]:
    """Return what goes over the wire for a time: microseconds since 2000."""
    return ((time - _SINCE) // _MICRO,)


def time_from_driver(stored: tuple[int]) -> datetime | int:
    """Return the time of what came over the wire; a number that is none is returned as it is."""
    try:
        return _SINCE + timedelta(microseconds=stored[0])
    except OverflowError:
        return stored[0]


def time_in(told: Any) -> Any:
    """Return a time of a row, or None; raise ValueError for one that is none."""
    if isinstance(told, int):
        raise ValueError("a time is out of range")
    return told
