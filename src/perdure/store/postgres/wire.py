"""How values stand in PostgreSQL: ids as bare UUIDs, digests as 32 bytes, free text as UTF-8 bytes.

Free text is text that a caller, a tool or a model makes up: PostgreSQL's `text` refuses U+0000.
"""

import re
from datetime import datetime
from uuid import UUID

from perdure.protocol.ids import hex_of

_DIGEST = re.compile(r"[0-9a-f]{64}")


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


def later(one: datetime, other: datetime) -> datetime:
    """Return the later of two times."""
    return max(one, other)
