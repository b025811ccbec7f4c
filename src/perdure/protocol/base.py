"""What every object of the protocol shares: frozen models and the way time is written."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    JsonValue,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import core_schema

SCHEMA_VERSION = 1
"""Version of the event, checkpoint and run shapes that this code writes (R-20.1)."""

RUNTIME_VERSION = 1
"""What a run may require of the worker that claims it; workers never claim a higher one."""

TENANT_DEFAULT = "default"
PRINCIPAL_LOCAL = "local"
"""The caller of an installation without authentication (decision 41)."""


def format_time(at: datetime) -> str:
    """Return RFC 3339 in UTC with six digits, as `2026-01-02T03:04:05.000006Z`."""
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _aware(at: datetime) -> datetime:
    if at.tzinfo is None:
        raise ValueError("a time needs a zone")
    return at.astimezone(UTC)


Time = Annotated[
    datetime,
    AfterValidator(_aware),
    PlainSerializer(format_time, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}, mode="serialization"),
]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_micros(at: datetime) -> int:
    """Return whole microseconds since 1970 in UTC, exactly."""
    return (at - _EPOCH) // timedelta(microseconds=1)


def from_micros(micros: int) -> datetime:
    """Return the aware UTC time of whole microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=micros)


class Model(BaseModel):
    """A frozen value. Unknown fields are refused: callers learn of a typing mistake at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stored(BaseModel):
    """A frozen value that is read back from storage: a later release's unknown fields pass by."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _AsItIs:
    """Takes a value without a look at it; unlike `SkipValidation` also when it is written out."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        del source, handler
        return core_schema.any_schema()


_ModelT = TypeVar("_ModelT", bound=BaseModel)


def read_known(model: type[_ModelT], stored: JsonValue) -> _ModelT | None:
    """Return what another release may have written, without the fields that this one does not know.

    None when what is left does not make sense here (R-20.4).
    """
    fields = stored if isinstance(stored, dict) else {}
    try:
        return model.model_validate(
            {name: value for name, value in fields.items() if name in model.model_fields}
        )
    except ValidationError:
        return None


StoredValue = Annotated[JsonValue, _AsItIs]
"""Plain JSON inside a stored object. Not looked at again: the codec made it (`clean`, `decode`)."""
