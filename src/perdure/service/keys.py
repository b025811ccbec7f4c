"""Idempotency keys of requests (R-3.2, decision 34): their bounds, and what a known one answers."""

from collections.abc import Mapping

from pydantic import JsonValue

from perdure.protocol.codec import digest
from perdure.protocol.errors import IdempotencyMismatch, Invalid
from perdure.protocol.values import IDEMPOTENCY_KEY_BYTES_MAX, RESERVED
from perdure.service.base import check_storable
from perdure.store.requests import Replayed, RequestKey

HEADER = "Idempotency-Key"
THREADS = "threads"
"""Scope of the keys of new threads; a message's is its thread."""


def check_key(key: str) -> str:
    """Return a header's key; raise Invalid for one out of bounds."""
    check_storable(key, HEADER)
    check_not_ours(key, HEADER)
    if not 0 < len(key.encode()) <= IDEMPOTENCY_KEY_BYTES_MAX:
        raise Invalid(f"{HEADER} takes 1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes", field=HEADER)
    return key


def check_not_ours(key: str | None, field: str) -> None:
    """Raise Invalid for a key such as the runtime itself gives to runs."""
    if key is not None and key.startswith(RESERVED):
        raise Invalid(f"keys that begin with `{RESERVED}` are the runtime's", field=field)


def request_key(key: str | None, scope: str, body: JsonValue) -> RequestKey | None:
    """Return the key of a request with this body, None without one. Raises Invalid."""
    if key is None:
        return None
    return RequestKey(scope=scope, key=check_key(key), fingerprint=digest(body))


def check_same(key: RequestKey, known: Replayed, named: Mapping[str, str]) -> None:
    """Raise IdempotencyMismatch, with the first object `named`, when the bodies differ."""
    if known.fingerprint != key.fingerprint:
        raise IdempotencyMismatch(
            "the idempotency key was used with another body", details=dict(named)
        )
