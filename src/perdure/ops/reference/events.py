"""The page of event types: what each means, its fields, and what readers may rely on."""

from typing import Any

from pydantic import BaseModel

from perdure.engine.journal import CODE, NOW, PATCHED, SLEEP
from perdure.engine.snapshot import (
    APPROVAL_EVENT_NAME,
    PENDING_EVENT_NAME,
    STATE_EVENT_NAME,
    STATE_UPDATE_EVENT_NAME,
)
from perdure.ops.reference.field_notes import note_of
from perdure.ops.reference.schemas import Schema, event_models, event_schema
from perdure.protocol.breakpoints import BREAKPOINTS_EVENT_NAME
from perdure.protocol.event_views import EventView
from perdure.protocol.fields import (
    FIELD_EVENT_NAME,
    KEPT_EVENT_NAME,
    READ_EVENT_NAME,
    SETTLED_EVENT_NAME,
)
from perdure.protocol.log import EVENT_TYPES
from perdure.protocol.stability import DEPRECATED, PROVISIONAL_TYPES, level_of, since
from perdure.protocol.topics import PUBLISHED_EVENT_NAME

HEAD = """\
# Events

A run's log is a list of events without gaps: `seq` is 1 for its creation and grows by one. Each
event stands for something that was durable in the same moment. This page lists every type; the
schema of its `data` is `schemas/event-<type>.json`, that of the whole event `schemas/event.json`.

Readers let types and fields pass that they do not know: a later release may add some. What a
field's level promises:

| level | promise |
|---|---|
| stable | name, type and meaning stay; before one goes it is marked deprecated for two minor releases |
| text | always there, worded for people; the wording may change at any time |
| provisional | not written yet, or its form may change in a minor release |

A field that is absent from a stored event has its default. Fields that are sent always stand in
the JSON, `null` when they have no value. A stored sample of every type and schema version is kept
and read by the tests of every release.

## Around the data

| field | type |
|---|---|
"""

OWN_NAMES: dict[str, tuple[str, str]] = {
    APPROVAL_EVENT_NAME: (
        "what happened to an open approval: told, passed on, handed on",
        "`approval_id`, `phase`, and what belongs to it: `approvers`, `by`, `reason`, `error`, `number`",
    ),
    BREAKPOINTS_EVENT_NAME: (
        "somebody who let a paused run go on set others",
        "the breakpoints, a list as in `options.breakpoints`",
    ),
    CODE: ("the first operation of a code agent's run", "the digest of its function"),
    FIELD_EVENT_NAME: (
        "a write to a declared field",
        "`field`, `rule`, `value`, `at` (its place), `call` of a tool's write; `scope`, `agent`",
    ),
    KEPT_EVENT_NAME: (
        "what a run that succeeded left in a field that outlives it",
        "`field`, `scope`, `rule`, `version`, `value`; `over`: what was there before",
    ),
    NOW: ("a code agent took the time", "the time"),
    PATCHED: ("a code agent's run has a change of its function", "the name of the change"),
    PENDING_EVENT_NAME: (
        "a call's result comes by callback",
        "`tool_call_id`, `external_ref`, `expires_in_s`",
    ),
    PUBLISHED_EVENT_NAME: (
        "a publication to a topic of the thread",
        "`topic`, `value`; a large one as its beginning, with its digest as `ref`",
    ),
    READ_EVENT_NAME: (
        "what a run found in a field that outlives it, as it began",
        "`field`, `scope`, `version`, `event` that left it, `value`; no `value`: nothing",
    ),
    SETTLED_EVENT_NAME: (
        "writes of a shared history that its own run has kept already",
        "`places` of the writes",
    ),
    SLEEP: ("a sleep begins", "`seconds`, or of a code agent `until`"),
    STATE_EVENT_NAME: ("the planner gave a new state of its own", "the state"),
    STATE_UPDATE_EVENT_NAME: (
        "somebody replaced the agent's own state by hand",
        "`state`, `by`, `reason`, and the `key` of the request",
    ),
}
"""Names of the custom events that the runtime writes: when it does, and what their value holds."""


def events_page() -> str:
    """Return the page."""
    envelope = EventView.model_json_schema(mode="serialization")["properties"]
    parts = [HEAD]
    parts += [f"| `{name}` | {type_text(schema)} |\n" for name, schema in envelope.items()]
    models = dict(event_models())
    parts += [_section(name, models[name]) for name in EVENT_TYPES]
    return "".join(parts)


def _section(name: str, model: type[BaseModel]) -> str:
    schema = event_schema(name, model)
    written = "not written yet" if name in PROVISIONAL_TYPES else "written by this release"
    lines = [
        f"\n## {name}\n\n{_meaning(name)}\n\n",
        f"Since {since(name)}; {written}{_deprecated(name)}.\n\n",
        "| field | type | level | meaning |\n|---|---|---|---|\n",
    ]
    lines += [
        f"| `{field}` | {type_text(found)} | {level_of(name, field)}{_added(name, field)} "
        f"| {note_of(name, field)} |\n"
        for field, found in schema["properties"].items()
    ]
    if name == "custom":
        lines.append(_OWN_HEAD)
        lines += [f"| `{own}` | {when} | {what} |\n" for own, (when, what) in OWN_NAMES.items()]
    return "".join(lines)


_OWN_HEAD = """
Those of the runtime itself:

| name | written when | value |
|---|---|---|
"""


def _meaning(name: str) -> str:
    model = dict(_stored())[name]
    return " ".join((model.__doc__ or "").split())


def _stored() -> list[tuple[str, type[BaseModel]]]:
    """Return the models as they are stored: their docstrings are the meanings."""
    return [
        (name, model.__mro__[1] if name == "state" else model) for name, model in event_models()
    ]


def _added(name: str, field: str) -> str:
    found = since(name, field)
    later = "" if found == since(name) else f", since {found}"
    return later + _deprecated(f"{name}.{field}")


def _deprecated(name: str) -> str:
    return f", deprecated since {DEPRECATED[name]}" if name in DEPRECATED else ""


def type_text(schema: Schema) -> str:
    """Return a JSON Schema as a few words for a table."""
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " / ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return "any JSON" if name == "JsonValue" else name
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_text(kind) for kind in schema["anyOf"]))
    kind: Any = schema.get("type", "any JSON")
    if kind == "array":
        return f"list of {type_text(schema.get('items', {}))}"
    return str(schema.get("format", kind))
