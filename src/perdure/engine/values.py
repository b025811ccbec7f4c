"""Keeping a value inline while it is small, and once by digest when it is not (R-5.9)."""

from pydantic import JsonValue, ValidationError

from perdure.engine.blame import place_in_code
from perdure.protocol.codec import clean, digest, digest_bytes, encode
from perdure.protocol.errors import TooLarge
from perdure.protocol.plain import value
from perdure.protocol.values import (
    BLOB_BYTES_MAX,
    INLINE_BYTES_MAX,
    PREVIEW_CHARACTERS,
    BlobRef,
)
from perdure.protocol.wording import all_problems
from perdure.store.requests import NewBlob


@value
class Kept:
    """A value as an event carries it: inline, or by reference with its content beside it."""

    inline: JsonValue
    ref: BlobRef | None
    blobs: tuple[NewBlob, ...]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the value: of its canonical JSON, or of the referenced content."""
        return digest(self.inline) if self.ref is None else self.ref.digest


def keep(value: JsonValue) -> Kept:
    """Return how a clean value is recorded; raise TooLarge beyond the blob limit."""
    data = encode(value)
    if len(data) <= INLINE_BYTES_MAX:
        return Kept(inline=value, ref=None, blobs=())
    if len(data) > BLOB_BYTES_MAX:
        raise TooLarge(f"a value is larger than {BLOB_BYTES_MAX} bytes")
    ref = BlobRef(
        digest=digest_bytes(data),
        size=len(data),
        preview=data[: PREVIEW_CHARACTERS * 4].decode("utf-8", "ignore")[:PREVIEW_CHARACTERS],
    )
    blob = NewBlob(digest=ref.digest, media_type=ref.media_type, data=data)
    return Kept(inline=None, ref=ref, blobs=(blob,))


def shown(inline: JsonValue, ref: BlobRef | None) -> JsonValue:
    """Return the value as a planner sees it: itself, or a description of the reference."""
    if ref is None:
        return inline
    return {"ref": ref.digest, "size": ref.size, "preview": ref.preview}


def short(text: str, limit: int = 2000) -> str:
    """Return the text as it can be stored, cut to `limit` characters with a mark."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return str(clean(text))


def describe(error: BaseException) -> str:
    """Return type, text and place of an error of foreign code, whose text may itself raise."""
    try:
        text = all_problems(error) if isinstance(error, ValidationError) else str(error)
    except Exception:  # noqa: BLE001  # a text that cannot be had is left out
        text = "(its text cannot be printed)"
    place = place_in_code(error)
    told = short(f"{type(error).__name__}: {text}", 1900)
    return f"{told} ({place})" if place else told
