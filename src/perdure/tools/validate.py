"""JSON Schema checks of arguments and results: compiled once per tool, no network, bounded text.

The draft is the schema's own `$schema`, else 2020-12. A `$ref` that leaves the document is never
fetched: such a schema is refused at registration.
"""

from collections.abc import Mapping
from itertools import islice

import jsonschema_rs
from pydantic import JsonValue

from perdure.protocol.codec import escape_pointer
from perdure.protocol.errors import Invalid
from perdure.protocol.tools import ToolSpec

PROBLEMS_MAX = 5
PROBLEM_CHARACTERS_MAX = 300

_PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)


def compile_schema(schema: Mapping[str, JsonValue]) -> jsonschema_rs.Validator:
    """Return the validator of a schema; raise Invalid when it is not one or points outside."""
    try:
        return jsonschema_rs.validator_for(
            dict(schema), validate_formats=True, offline=True, pattern_options=_PATTERNS
        )
    except (jsonschema_rs.ReferencingError, ValueError) as error:
        raise Invalid(f"the JSON Schema cannot be used: {_capped(str(error))}") from None


def problem_with(validator: jsonschema_rs.Validator, value: JsonValue) -> str | None:
    """Return what is wrong with a value, each problem with its JSON pointer, or None."""
    try:
        if validator.is_valid(value):
            return None
        errors = list(islice(validator.iter_errors(value), PROBLEMS_MAX + 1))
    except ValueError as error:  # too deep, or a pattern that backtracks without end
        return f"/: cannot be checked: {_capped(str(error))}"
    lines = [f"{_pointer(error)}: {_capped(error.message)}" for error in errors[:PROBLEMS_MAX]]
    if len(errors) > PROBLEMS_MAX:
        lines.append("and more")
    return "; ".join(lines)


class SchemaChecks:
    """The compiled schemas of the tools of a runner. May be used from any thread."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[str, str], tuple[ToolSpec, jsonschema_rs.Validator]] = {}
        self._outputs: dict[tuple[str, str], tuple[ToolSpec, jsonschema_rs.Validator | None]] = {}

    def problem_with_args(self, spec: ToolSpec, args: JsonValue) -> str | None:
        """Return what is wrong with a tool's arguments, or None."""
        if not isinstance(args, dict):
            return "/: the arguments must be an object"
        key = (spec.name, spec.version)
        kept = self._inputs.get(key)
        if kept is None or (kept[0] is not spec and kept[0] != spec):
            kept = self._inputs[key] = (spec, compile_schema(spec.input_schema))
        return problem_with(kept[1], args)

    def problem_with_output(self, spec: ToolSpec, output: JsonValue) -> str | None:
        """Return what is wrong with a tool's output, or None; None too without a schema."""
        if spec.output_schema is None:
            return None
        key = (spec.name, spec.version)
        kept = self._outputs.get(key)
        if kept is None or (kept[0] is not spec and kept[0] != spec):
            kept = self._outputs[key] = (spec, compile_schema(spec.output_schema))
        return None if kept[1] is None else problem_with(kept[1], output)


def _pointer(error: jsonschema_rs.ValidationError) -> str:
    tokens = (escape_pointer(str(token)) for token in error.instance_path)
    return _capped("/" + "/".join(tokens))


def _capped(text: str) -> str:
    if len(text) <= PROBLEM_CHARACTERS_MAX:
        return text
    return text[:PROBLEM_CHARACTERS_MAX] + "…"
