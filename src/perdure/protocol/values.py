"""Values that may be too large to stand inline: kept once by digest, with a preview (R-5.9)."""

from pydantic import JsonValue

from perdure.protocol.base import Stored

INLINE_BYTES_MAX = 8 * 1024
BLOB_BYTES_MAX = 16 * 1024 * 1024
PREVIEW_CHARACTERS = 500
RESERVED = "perdure."
"""What names begin with that are the runtime's own."""

EVENT_DATA_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 4 * 1024 * 1024
METADATA_KEYS_MAX = 50
METADATA_BYTES_MAX = 64 * 1024
CALLS_PER_STEP_MAX = 128
NAME_CHARACTERS_MAX = 200
IDEMPOTENCY_KEY_BYTES_MAX = 255
SSE_BUFFER_BYTES_MAX = 1024 * 1024
WAIT_SECONDS_MAX = 60


class BlobRef(Stored):
    """A reference to content in the blob store, by SHA-256."""

    digest: str
    size: int
    media_type: str = "application/json"
    preview: str = ""


class Value(Stored):
    """A JSON value inline, or the reference to it."""

    inline: JsonValue = None
    ref: BlobRef | None = None
