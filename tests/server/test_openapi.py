"""The OpenAPI document is complete, and what the server answers is what it says."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import FailedHealthCheck, Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from tests.server.cases import has_odd_path
from tests.server.refusals import REFUSALS
from tests.server.world import World, open_world

_WAIT_S = 0.02
_STRICTER: Any = checks.__dict__["positive_data_acceptance"]


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, with ids of objects that exist."""

    world: World
    ids: dict[str, str]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(open_world(serve=True)) as world,
        httpx2.Client(base_url=f"http://127.0.0.1:{world.port}") as http,
    ):
        run = http.post("/v1/agents/echo/run?wait=5", json={"input": {"times": 2}}).json()
        asked = http.post("/v1/agents/publisher/run?wait=0.5", json={"input": {}}).json()
        path = f"/v1/runs/{run['run_id']}"
        messages = http.get(f"/v1/threads/{run['thread_id']}/messages").json()["items"]

        def first(name: str, key: str) -> str:
            return http.get(f"{path}/{name}").json()["items"][0][key]

        yield Served(
            world,
            {
                "agent_id": "echo",
                "run_id": run["run_id"],
                "thread_id": run["thread_id"],
                "message_id": messages[0]["message_id"],
                "event_id": f"evt_{run['run_id'][4:]}_1",
                "step_id": first("steps", "step_id"),
                "tool_call_id": first("tool_calls", "tool_call_id"),
                "checkpoint_id": first("checkpoints", "checkpoint_id"),
                "interrupt_id": asked["open_interrupts"][0],
            },
        )


@pytest.fixture(scope="module")
def api(served: Served) -> Any:
    configs: Any = schemathesis.Config  # its constructor has no types
    config = configs.from_dict(
        {"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}}
    )
    return schemathesis.openapi.from_url(
        f"http://127.0.0.1:{served.world.port}/openapi.json", config=config
    )


def _check(operation: Any, mode: GenerationMode, served: Served) -> None:
    """Half of the requests go to objects that exist; waits are short."""

    @settings(
        max_examples=10,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(case=operation.as_strategy(generation_mode=mode), is_known=st.booleans())
    def check(case: Any, is_known: bool) -> None:
        query: dict[str, Any] = case.query
        if query.get("wait"):
            query["wait"] = _WAIT_S
        if case.path_parameters and is_known and not has_odd_path(case):
            known = {name: served.ids.get(name) for name in case.path_parameters}
            case.path_parameters.update({name: found for name, found in known.items() if found})
        if case.path == "/v1/threads/{thread_id}/events":  # as a stream it does not end
            case.headers = {**(case.headers or {}), "Accept": "application/json"}
        # a well-formed request may still be refused: an opaque cursor, a rule beyond the schema
        case.call_and_validate(timeout=10, excluded_checks=[_STRICTER])

    with contextlib.suppress(
        Unsatisfiable, FailedHealthCheck
    ):  # nothing of this mode to send to this operation
        check()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_answers_fit_the_document(
    api: Any, served: Served, mode: GenerationMode, subtests: pytest.Subtests
) -> None:
    for result in api.get_all_operations():
        operation = result.ok()
        with subtests.test(operation.label):
            _check(operation, mode, served)


def test_every_operation_is_named_and_described(served: Served) -> None:
    document = httpx2.get(f"http://127.0.0.1:{served.world.port}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    names = [operation["operationId"] for _, _, operation in operations]
    assert len(names) == len(set(names))
    for path, method, operation in operations:
        assert operation["summary"], path
        responses = operation["responses"]
        assert any(status.startswith("2") for status in responses), path
        if path.startswith("/v1"):
            assert operation["description"], path
            assert {"400", "403", "500", "503"} <= set(responses), path
        if method == "post":
            (body,) = operation["requestBody"]["content"].values()
            assert body["examples"], path
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_a_part_of_a_message_is_told_by_its_type(served: Served) -> None:
    document = httpx2.get(f"http://127.0.0.1:{served.world.port}/openapi.json").json()
    schemas = document["components"]["schemas"]
    parts = schemas["MessageRequest"]["properties"]["parts"]["items"]
    names = [part["$ref"].rsplit("/", 1)[1] for part in parts["oneOf"]]
    assert len(set(parts["discriminator"]["mapping"].values())) == len(names) == 7
    assert len(parts["discriminator"]["mapping"]) == 7, (
        "one schema each: readers take one type of it"
    )
    for name in names:
        assert "type" in schemas[name]["required"], name
        assert "default" not in schemas[name]["properties"]["type"], name


def test_the_documentation_page_loads_nothing_from_elsewhere(served: Served) -> None:
    with httpx2.Client(base_url=f"http://127.0.0.1:{served.world.port}") as http:
        page = http.get("/docs")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert "//" not in page.text.replace("<!doctype", "")
        for path in ("/docs/docs.js", "/docs/docs.css"):
            answer = http.get(path)
            assert answer.status_code == 200
            assert "://" not in answer.text
