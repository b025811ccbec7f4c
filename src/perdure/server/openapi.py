"""The OpenAPI document: the framework's, with problems documented as what they are."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from fastapi import FastAPI

from perdure.server.problems import KINDS, MEDIA_TYPE, TELLS_WHEN, Problem

Responses = dict[int | str, dict[str, Any]]

_EXAMPLE: dict[str, Any] = {
    "type": "urn:perdure:problem:not_found",
    "title": KINDS["not_found"].title,
    "status": 404,
    "detail": "there is no such run",
    "instance": "urn:perdure:request:req_0193f2b76a2e7c5d8f6b1a2c3d4e5f60",
    "code": "not_found",
    "field": None,
    "errors": [],
    "details": {},
    "next_actions": [],
}

_REFERENCE = "#/components/schemas/{model}"
_PROBLEM = {"$ref": _REFERENCE.format(model="Problem")}

STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "description": "one event of the stream, or text of a reply as it comes (`live`, see the "
            "concepts); `data` is one line of JSON",
            "required": ["data"],
            "properties": {
                "id": {
                    "type": "string",
                    "description": "the seq, or the place in a thread; live text has none",
                },
                "data": {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": {"$ref": _REFERENCE.format(model="EventView")},
                },
            },
        }
    }
}
"""The content of an event stream, as OpenAPI readers take it: by event."""

_ALWAYS = ("malformed", "forbidden", "internal", "invalid", "unreadable", "unavailable")
_WITH_BODY = ("too_slow", "too_large", "unsupported_media", "store_full")


def may_answer(*codes: str, body: bool = False) -> Responses:
    """Return the documented problems of a route: these codes and those that every route has.

    Each may answer `invalid`: it refuses query parameters that it does not have, and repeated ones.
    """
    return problems({*_ALWAYS, *codes, *(_WITH_BODY if body else ())})


def problems(codes: Iterable[str]) -> Responses:
    """Return the documented problems of a route that answers with these codes alone."""
    by_status: dict[int | str, list[str]] = {}
    for code in sorted(codes):
        by_status.setdefault(KINDS[code].status, []).append(code)
    return {
        status: {
            "description": "Problem: " + ", ".join(f"`{code}`" for code in found),
            "content": {MEDIA_TYPE: {"schema": _PROBLEM, **_example(status)}},
            **_headers(found),
        }
        for status, found in sorted(by_status.items(), key=lambda item: str(item[0]))
    }


def header(description: str, kind: str = "string") -> dict[str, Any]:
    """Return a documented header of an answer."""
    return {"description": description, "schema": {"type": kind}}


def install_openapi(app: FastAPI) -> None:
    """Make the application's document the framework's with our corrections, made once."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = original()
            _correct(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi


def _correct(schema: dict[str, Any]) -> None:
    """Name the problem's schema; replace the framework's own validation error by it."""
    paths = cast("Mapping[str, Mapping[str, dict[str, Any]]]", schema["paths"])
    for operations in paths.values():
        for operation in operations.values():
            operation["responses"] = dict(sorted(operation["responses"].items()))
            for response in operation["responses"].values():
                _correct_response(response)
            for parameter in operation.get("parameters", []):
                _correct_parameter(parameter["schema"])
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    problem = Problem.model_json_schema(ref_template=_REFERENCE)
    components.update(problem.pop("$defs"))
    components["Problem"] = problem


def _correct_response(response: dict[str, Any]) -> None:
    found = response.get("content", {}).get("application/json", {}).get("schema", {})
    if found.get("$ref", "").endswith("/HTTPValidationError"):
        response["description"] = "Problem: `invalid`"
        response["content"] = {MEDIA_TYPE: {"schema": _PROBLEM}}


def _correct_parameter(schema: dict[str, Any]) -> None:
    """Drop the null of an optional parameter: one that is absent has no value at all."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema.update(kinds[0])


def _headers(codes: Iterable[str]) -> dict[str, Any]:
    if TELLS_WHEN.isdisjoint(codes):
        return {}
    return {"headers": {"Retry-After": header("seconds to wait before trying again", "integer")}}


def _example(status: int | str) -> dict[str, Any]:
    return {"example": _EXAMPLE} if status == 404 else {}
