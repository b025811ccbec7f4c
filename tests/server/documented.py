"""Whether what a server answers stands in its document: every answer to the clients of the tests.

Status, headers, media type, body, and for an error its code; where a request was accepted, its body
too.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import jsonschema_rs

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
JSON = "application/json"
_PROBLEM = "application/problem+json"
_NO_CONTENT = frozenset({204, 304})
_OF_EVERY_ANSWER = frozenset(
    {
        "cache-control",
        "connection",
        "content-length",
        "content-security-policy",
        "content-type",
        "cross-origin-resource-policy",
        "date",
        "referrer-policy",
        "transfer-encoding",
        "x-accel-buffering",
        "x-content-type-options",
        "x-frame-options",
        "x-request-id",
    }
)
"""Headers of the transport, and those that the document need not name for each answer."""


@dataclass(frozen=True, slots=True)
class _Path:
    shape: re.Pattern[str]
    operations: dict[str, dict[str, Any]]


def checked_client(
    base_url: str,
    *,
    transport: httpx2.AsyncBaseTransport | None = None,
    headers: dict[str, str] | None = None,
) -> httpx2.AsyncClient:
    """Return a client that fails on an answer that is not as the document says."""
    hooks = {"response": [_check]}
    return httpx2.AsyncClient(
        base_url=base_url, transport=transport, headers=headers, event_hooks=hooks
    )


async def _check(response: httpx2.Response) -> None:
    request = response.request
    operation = _operation(request.method, request.url.path)
    if operation is None:
        return
    where = f"{request.method} {request.url.path}: {response.status_code}"
    known = operation["responses"].get(str(response.status_code))
    assert known is not None, f"{where} is not documented"
    named = {name.lower() for name in known.get("headers", ())}
    unnamed = response.headers.keys() - named - _OF_EVERY_ANSWER
    assert not unnamed, f"{where}: {unnamed} are not documented"
    if response.status_code in _NO_CONTENT:
        return
    media_type = response.headers.get("content-type", "").partition(";")[0]
    content = known["content"].get(media_type, known["content"].get("*/*"))
    assert content is not None, f"{where}: {media_type} is not documented"
    if media_type not in {JSON, _PROBLEM}:
        return
    body = json.loads(await response.aread())
    _validate(content["schema"], body, where)
    if media_type == _PROBLEM:
        codes = re.findall(r"`([a-z_]+)`", known["description"])
        assert body["code"] in codes, f"{where}: {body['code']} is not documented"
    elif request.content and request.headers.get("content-type") == JSON:
        sent = operation["requestBody"]["content"][JSON]["schema"]
        _validate(sent, json.loads(request.content), f"{where}, which was sent")


def _operation(method: str, path: str) -> dict[str, Any] | None:
    for known in _paths():
        if known.shape.fullmatch(path):
            return known.operations.get(method.lower())
    return None


def _validate(schema: dict[str, Any], value: object, where: str) -> None:
    validator = _validator(json.dumps(schema))
    error = next(iter(validator.iter_errors(value)), None)
    assert error is None, f"{where}: {error}"


@cache
def _document() -> dict[str, Any]:
    return json.loads(DOCUMENT.read_text(encoding="utf-8"))


@cache
def _paths() -> list[_Path]:
    """Return the document's paths, those without parameters first."""
    found = [
        _Path(re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), operations)
        for path, operations in _document()["paths"].items()
    ]
    return sorted(found, key=lambda one: "[" in one.shape.pattern)


@cache
def _validator(schema: str) -> jsonschema_rs.Draft202012Validator:
    whole = {**json.loads(schema), "components": _document()["components"]}
    return jsonschema_rs.Draft202012Validator(whole)
