"""One JSON codec (decision 38): strict at the API's door, lenient but lossless-or-tagged for tools.

`parse_strict` refuses what would not survive a round trip: non-finite numbers, integers beyond
2^53 - 1, duplicate keys, lone surrogates, too much depth. `clean` turns anything a tool or model
returned into plain JSON: what JSON cannot hold becomes a tagged string. `encode` writes the bytes
that are stored, `canonical` those that are digested (sorted keys).
"""

import hashlib
import json
import math
import re
from collections.abc import ItemsView, Mapping, Sequence
from typing import cast

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from perdure.protocol.errors import Invalid, Malformed

INTEGER_MAX = 2**53 - 1
DEPTH_MAX = 64
ELEMENTS_MAX = 100_000
"""How many members and items a caller's JSON may have in all: handling them is what takes time."""

_canonical = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=True
)


def encode(value: JsonValue) -> bytes:
    """Return the compact UTF-8 JSON of a clean value, keys in their order."""
    return to_json(value)


def decode(data: bytes) -> JsonValue:
    """Return the value of JSON bytes that this codec wrote."""
    return cast("JsonValue", from_json(data))


def canonical(value: JsonValue) -> bytes:
    """Return the bytes a digest is made of: compact UTF-8 JSON with sorted keys."""
    return _canonical.encode(value).encode()


def digest(value: JsonValue) -> str:
    """Return the SHA-256 of the canonical bytes, 64 hex digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def digest_bytes(data: bytes) -> str:
    """Return the SHA-256 of raw bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def parse_strict(
    data: bytes, *, depth_max: int = DEPTH_MAX, elements_max: int | None = ELEMENTS_MAX
) -> JsonValue:
    """Parse a caller's JSON; raise Malformed for broken JSON, Invalid for what is refused."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"the body is not UTF-8 (byte {error.start})") from None
    _check_depth(data, depth_max)
    if elements_max is not None:
        _check_elements(data, elements_max)
    try:
        value = cast(
            "JsonValue",
            json.loads(
                text,
                object_pairs_hook=_unique_object,
                parse_constant=_refuse_constant,
                parse_int=_bounded_int,
                parse_float=_finite_float,
            ),
        )
    except json.JSONDecodeError as error:
        raise Malformed(
            f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    check_text(value)
    return value


def check_text(value: JsonValue, pointer: str = "") -> None:
    """Raise Invalid when a string or key holds a lone surrogate, with a pointer to it."""
    if isinstance(value, str):
        if not _is_text(value):
            raise Invalid("the text holds a lone surrogate", field=pointer or "/")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not _is_text(key):
                raise Invalid("a key holds a lone surrogate", field=pointer or "/")
            check_text(item, f"{pointer}/{escape_pointer(key)}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_text(item, f"{pointer}/{index}")


def escape_pointer(key: str) -> str:
    """Return a key as a JSON pointer token (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def clean(value: object, *, depth_max: int = DEPTH_MAX) -> JsonValue:
    """Return a tool's or model's value as plain JSON; raise Invalid when it cannot be one.

    Lone surrogates become U+FFFD; non-finite numbers and integers beyond 2^53 - 1 become
    strings such as "NaN", "Infinity" or "9007199254740993"; tuples become arrays.
    """
    if depth_max < 0:
        raise Invalid("the value is nested too deeply")
    kind = type(value)  # strings and dicts are most of what there is
    if kind is str and cast("str", value).isascii():
        return cast("str", value)
    if kind is dict:
        return _clean_items(cast("dict[object, object]", value).items(), depth_max)
    if value is None:
        return None
    return _clean_other(value, depth_max)


def _clean_other(value: object, depth_max: int) -> JsonValue:
    match value:
        case None | bool():
            return value
        case str():
            return value if _is_text(value) else _replace_surrogates(value)
        case int():
            return int(value) if -INTEGER_MAX <= value <= INTEGER_MAX else _integer_text(value)
        case float():
            return float(value) if math.isfinite(value) else _non_finite(value)
        case Mapping():
            return _clean_items(cast("Mapping[object, object]", value).items(), depth_max)
        case bytes() | bytearray() | memoryview():
            raise Invalid("bytes are not JSON; return text or make an artifact")
        case Sequence() | set() | frozenset():
            items = cast("Sequence[object]", value)
            return [clean(item, depth_max=depth_max - 1) for item in items]
        case _:
            return _clean_object(value, depth_max)


def _clean_items(items: ItemsView[object, object], depth_max: int) -> JsonValue:
    if depth_max <= 0 and items:
        raise Invalid("the value is nested too deeply")
    return {
        key if type(key) is str and key.isascii() else _clean_key(key): item
        if type(item) is str and item.isascii()
        else clean(item, depth_max=depth_max - 1)
        for key, item in items
    }


def _clean_object(value: object, depth_max: int) -> JsonValue:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return clean(dump(mode="json"), depth_max=depth_max - 1)
    raise Invalid(f"a value of type {type(value).__name__} is not JSON")


def _clean_key(key: object) -> str:
    if not isinstance(key, str):
        raise Invalid(f"a key of type {type(key).__name__} is not JSON")
    return key if _is_text(key) else _replace_surrogates(key)


def _integer_text(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to print more than 4,300 digits
        return hex(value)


def _non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _replace_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NESTING = {0x5B: 1, 0x7B: 1, 0x5D: -1, 0x7D: -1}


def _check_depth(data: bytes, depth_max: int) -> None:
    """Refuse deep nesting before a parser recurses into it."""
    if data.count(b"[") + data.count(b"{") <= depth_max:
        return
    depth = 0
    for byte in _STRING.sub(b"", data):
        depth += _NESTING.get(byte, 0)
        if depth > depth_max:
            raise Invalid(f"the body is nested deeper than {depth_max}")


def _check_elements(data: bytes, elements_max: int) -> None:
    """Refuse a body of very many values before they are made; each but the first has a comma."""
    if data.count(b",") < elements_max:
        return
    if _STRING.sub(b"", data).count(b",") >= elements_max:
        raise Invalid(
            f"the body has more than {elements_max} members and items",
            details={"elements_max": elements_max},
        )


def _unique_object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Invalid("an object has the same key twice", details={"key": key[:200]})
            seen.add(key)
    return found


def _refuse_constant(text: str) -> float:
    raise Invalid(f"{text} is not JSON")


def _bounded_int(text: str) -> int:
    if len(text) > 17:
        raise Invalid("an integer is beyond 2^53 - 1")
    value = int(text)
    if not -INTEGER_MAX <= value <= INTEGER_MAX:
        raise Invalid("an integer is beyond 2^53 - 1")
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Invalid("a number is out of range")
    return value
