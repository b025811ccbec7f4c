"""JSON Schema checks: compiled once, no network, bounded text and work.

The draft is the schema's own `$schema`, else 2020-12. A `$ref` that leaves the document is never
fetched, neither by HTTP nor from a file: such a schema is refused. References within it are
counted, because a chain of doubled ones takes exponential time to check.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import cast

import jsonschema_rs
from pydantic import JsonValue

from perdure.protocol.codec import decode, encode, escape_pointer
from perdure.protocol.errors import Invalid

SCHEMA_BYTES_MAX = 64 * 1024
REFERENCES_MAX = 40
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


def problem_with_value(schema: Mapping[str, JsonValue], value: JsonValue) -> str | None:
    """Return what is wrong with a value by a caller's or planner's schema, or None.

    Raises Invalid when the schema itself cannot be used.
    """
    return problem_with(_bounded(encode(dict(schema))), value)


def check_schema(schema: Mapping[str, JsonValue], field: str | None = None) -> None:
    """Raise Invalid when a caller's or planner's schema cannot be used."""
    try:
        _bounded(encode(dict(schema)))
    except Invalid as error:
        raise Invalid(error.message, field=field) from None


@lru_cache(maxsize=1024)
def _bounded(schema: bytes) -> jsonschema_rs.Validator:
    if len(schema) > SCHEMA_BYTES_MAX:
        raise Invalid(f"a JSON Schema has at most {SCHEMA_BYTES_MAX} bytes")
    if schema.count(b'"$ref"') + schema.count(b'"$dynamicRef"') > REFERENCES_MAX:
        raise Invalid(f"a JSON Schema has at most {REFERENCES_MAX} references")
    return compile_schema(cast("dict[str, JsonValue]", decode(schema)))


def _pointer(error: jsonschema_rs.ValidationError) -> str:
    tokens = (escape_pointer(str(token)) for token in error.instance_path)
    return _capped("/" + "/".join(tokens))


def _capped(text: str) -> str:
    if len(text) <= PROBLEM_CHARACTERS_MAX:
        return text
    return text[:PROBLEM_CHARACTERS_MAX] + "…"
