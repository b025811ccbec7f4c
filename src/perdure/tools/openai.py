"""OpenAI function schemas: Perdure's tools to them, and theirs to Perdure's (R-5.2)."""

from collections.abc import Iterable, Mapping
from typing import cast

from pydantic import JsonValue

from perdure.protocol.errors import Invalid
from perdure.protocol.states import SideEffect
from perdure.protocol.tools import ToolSpec


def openai_name(name: str) -> str:
    """Return a tool's name as OpenAI allows it: no dots."""
    return name.replace(".", "_")


def to_openai(spec: ToolSpec) -> dict[str, JsonValue]:
    """Return the function schema of a tool, as the chat completions API takes it."""
    return {
        "type": "function",
        "function": {
            "name": openai_name(spec.name),
            "description": spec.description,
            "parameters": spec.input_schema,
        },
    }


def openai_names(specs: Iterable[ToolSpec]) -> dict[str, str]:
    """Return OpenAI's name → the tool's name; raise Invalid when two tools share one."""
    names: dict[str, str] = {}
    for spec in specs:
        theirs = openai_name(spec.name)
        if names.setdefault(theirs, spec.name) != spec.name:
            raise Invalid(f"tools {names[theirs]} and {spec.name} share the name {theirs}")
    return names


def from_openai(
    schema: Mapping[str, JsonValue],
    *,
    version: str = "1",
    side_effect: SideEffect = SideEffect.EXTERNAL,
    idempotent: bool | None = None,
    timeout_s: float | None = None,
    compensation: str | None = None,
) -> ToolSpec:
    """Return the declaration in an OpenAI function schema (nested, flat or bare).

    The schema is silent about effects, so the tool counts as `external` (and therefore
    sandbox-only) until the importer says more. Raises Invalid when it is no function schema.
    """
    function = schema.get("function", schema)
    if schema.get("type", "function") != "function" or not isinstance(function, dict):
        raise Invalid("not an OpenAI function schema", field="/type")
    name, description = function.get("name"), function.get("description") or ""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(name, str) or not isinstance(description, str):
        raise Invalid("a function schema needs a name", field="/function/name")
    if not isinstance(parameters, dict):
        raise Invalid("the parameters must be a JSON Schema", field="/function/parameters")
    try:
        return ToolSpec(
            name=name,
            version=version,
            description=description,
            input_schema=cast("dict[str, JsonValue]", parameters),
            side_effect=side_effect,
            idempotent=idempotent,
            timeout_s=timeout_s,
            compensation=compensation,
        )
    except ValueError as error:
        raise Invalid(f"not a usable tool: {error}") from None
