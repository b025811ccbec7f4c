"""Messages of a thread and their typed parts (R-1.2). Every message is attributed."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from perdure.protocol.base import Model, Time
from perdure.protocol.values import BlobRef, Value


class Role(StrEnum):
    """Whose turn in the conversation a message is."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    TOOL = "tool"


def _name_the_type(schema: dict[str, JsonValue]) -> None:
    """Say in the JSON Schema that `type` must stand: a part is told from the others by it."""
    properties, required = schema["properties"], schema.setdefault("required", [])
    assert isinstance(properties, dict)
    assert isinstance(required, list)
    kind = properties["type"]
    assert isinstance(kind, dict)
    kind.pop("default", None)
    if "type" not in required:
        required.insert(0, "type")


class _Part(Model):
    model_config = ConfigDict(json_schema_extra=_name_the_type)


class TextPart(_Part):
    """Plain text."""

    type: Literal["text"] = "text"
    text: str


class DataPart(_Part):
    """A structured value."""

    type: Literal["data"] = "data"
    data: JsonValue


class ImagePart(_Part):
    """An image, by URL or by stored content."""

    type: Literal["image"] = "image"
    media_type: str = Field(max_length=200)
    url: str | None = Field(default=None, max_length=2000)
    ref: BlobRef | None = None


class AudioPart(_Part):
    """A sound, by URL or by stored content."""

    type: Literal["audio"] = "audio"
    media_type: str = Field(max_length=200)
    url: str | None = Field(default=None, max_length=2000)
    ref: BlobRef | None = None


class FilePart(_Part):
    """A reference to a file or artifact."""

    type: Literal["file"] = "file"
    name: str = Field(max_length=200)
    media_type: str = Field(default="application/octet-stream", max_length=200)
    artifact_id: str | None = Field(default=None, max_length=100)
    url: str | None = Field(default=None, max_length=2000)


class ToolCallPart(_Part):
    """A tool call that a message mentions; the call itself is an object of its own."""

    type: Literal["tool_call"] = "tool_call"
    tool_call_id: str = Field(max_length=200)
    tool: str = Field(max_length=200)
    args: JsonValue = None


class ToolResultPart(_Part):
    """A tool result that a message mentions."""

    type: Literal["tool_result"] = "tool_result"
    tool_call_id: str = Field(max_length=200)
    status: str = Field(max_length=50)
    output: JsonValue = None


Part = Annotated[
    TextPart | DataPart | ImagePart | AudioPart | FilePart | ToolCallPart | ToolResultPart,
    Field(discriminator="type"),
]


class Message(Model):
    """A message as it is shown. `content` of a large message may be a reference."""

    message_id: str
    thread_id: str
    tenant_id: str
    position: int
    run_id: str | None
    role: Role
    author: str
    parts: list[Part]
    ref: BlobRef | None = None
    created_at: Time


def parts_of(value: JsonValue) -> list[Part]:
    """Return the parts that a plain value stands for: text for a string, data for all else."""
    if value is None:
        return []
    return [TextPart(text=value)] if isinstance(value, str) else [DataPart(data=value)]


def parts_of_value(value: Value) -> list[Part]:
    """Return the parts of a stored value; a referenced one shows its preview as text."""
    if value.ref is not None:
        return [TextPart(text=value.ref.preview)]
    return parts_of(value.inline)
