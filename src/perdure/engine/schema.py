"""JSON Schema checks, compiled once per schema."""

from collections.abc import Mapping
from functools import lru_cache
from typing import cast

import jsonschema_rs
from pydantic import JsonValue

from perdure.protocol.codec import decode, encode


@lru_cache(maxsize=1024)
def _validator(schema: bytes) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(cast("dict[str, object]", decode(schema)))


def problem_with(schema: Mapping[str, JsonValue], value: JsonValue) -> str | None:
    """Return what is wrong with a value by a schema, with a pointer to it; None when it fits."""
    for error in _validator(encode(dict(schema))).iter_errors(value):
        pointer = "".join(f"/{part}" for part in error.instance_path)
        return f"{pointer or '/'}: {error.message}"[:500]
    return None


def problem_with_schema(schema: Mapping[str, JsonValue]) -> str | None:
    """Return why a schema itself cannot be used; None when it can."""
    try:
        _validator(encode(dict(schema)))
    except ValueError as error:
        return str(error)[:500]
    return None
