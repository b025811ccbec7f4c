"""Errors on the wire: one table, no secrets, logged once."""

import logging
import re
from pathlib import Path

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import Response

from perdure.protocol import errors
from perdure.protocol.errors import PerdureError, Unavailable
from perdure.server import problems
from perdure.server.app import create_app
from perdure.server.settings import ServerSettings
from tests.server.world import open_world

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "problems.md"


def test_the_documentation_is_the_table() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == problems.table()


def _tree(kind: type[PerdureError]) -> list[type[PerdureError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _tree(child))]


def test_every_error_of_the_tree_has_its_documented_status() -> None:
    listed = [line for line in (errors.__doc__ or "").splitlines() if "`" in line]
    for kind in _tree(PerdureError):
        if kind.__module__ != errors.__name__ or kind is PerdureError:
            continue
        line = next(line for line in listed if f"`{kind.code}`" in line)
        status = problems.KINDS[kind.code].status
        assert str(status) in line or status == 409


async def test_an_unknown_error_shows_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_world(works=False) as world:

        async def fail(_: Request) -> Response:
            raise RuntimeError("password is hunter2")

        world.app.router.add_route("/fail", fail)
        with caplog.at_level(logging.ERROR):
            answer = await world.http.get("/fail")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "hunter2" not in answer.text
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == 1
    assert logged[0].__dict__["request_id"] in answer.json()["instance"]


async def test_no_route_passes_over_a_query_parameter_that_it_does_not_have() -> None:
    """R-3.2: a misspelt filter would answer with everything; it is refused as a body's field is."""
    async with open_world(works=False) as world:
        document = (await world.http.get("/openapi.json")).json()
        operations = [
            (method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if path.startswith("/v1/")
        ]
        assert len(operations) > 40
        for method, path, operation in operations:
            assert "422" in operation["responses"], path
            known = {one["name"] for one in operation.get("parameters", []) if one["in"] == "query"}
            answer = await world.http.request(
                method,
                re.sub(r"\{\w+\}", "x", path),
                params={"stat": "failed"},
                json={} if "requestBody" in operation else None,
            )
            found = answer.json()
            assert (answer.status_code, found["code"]) == (422, "invalid"), path
            assert found["field"] == "stat", path
            assert all(name in found["detail"] for name in known), path


async def test_a_store_that_is_away_asks_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_world(works=False) as world:

        async def away() -> None:
            raise Unavailable("the store does not answer")

        monkeypatch.setattr(world.core.reader, "ping", away)
        answer = await world.http.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert answer.headers["Retry-After"] == "1"
        assert (await world.http.get("/livez")).status_code == 200


async def test_a_draining_server_is_alive_and_not_ready() -> None:
    async with open_world(works=False) as world:
        world.stopping.set()
        assert (await world.http.get("/readyz")).status_code == 503
        assert (await world.http.get("/healthz")).status_code == 503
        assert (await world.http.get("/livez")).status_code == 200


def test_a_problem_survives_text_that_is_not_text() -> None:
    made = problems.make_problem("invalid", "half \ud83d", details={"key": "\ud83d"})
    assert made.model_dump_json()
    assert problems.make_problem("nonsense", "x").status == 500


async def test_an_application_without_bindings_serves_health_only() -> None:
    async with open_world(works=False) as world:
        app = create_app(world.service, ServerSettings())
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/livez")).status_code == 200
            assert (await http.get("/v1/runs")).status_code == 404
