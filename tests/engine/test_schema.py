"""Schemas of callers and planners are data: they fetch nothing and cost a bounded time."""

import http.server
import threading
from pathlib import Path

import pytest
from pydantic import JsonValue

from perdure.engine.schema import check_schema, problem_with_value
from perdure.protocol.errors import Invalid


def test_a_reference_to_a_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    """R-21.2: no local file is read through a schema."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"enum": ["top secret"]}', encoding="utf-8")
    with pytest.raises(Invalid) as refused:
        check_schema({"$ref": secret.as_uri()})
    assert "top secret" not in refused.value.message


def test_a_reference_to_a_server_is_refused_without_asking_it() -> None:
    """R-21.2: no request leaves through a schema."""
    asked: list[str] = []

    class Canary(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Canary)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.raises(Invalid):
            check_schema({"$ref": f"http://127.0.0.1:{server.server_port}/schema"})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == []


def test_a_chain_of_doubled_references_is_refused() -> None:
    """A schema that would take exponential time to check is not accepted."""
    definitions: dict[str, JsonValue] = {}
    for place in range(30):
        step: JsonValue = {"$ref": f"#/$defs/a{place + 1}"}
        definitions[f"a{place}"] = {"allOf": [step, step]}
    definitions["a30"] = {"type": "integer"}
    with pytest.raises(Invalid):
        check_schema({"$defs": definitions, "$ref": "#/$defs/a0"})


def test_a_local_reference_is_followed() -> None:
    """What stands within the document may be referred to."""
    schema: dict[str, JsonValue] = {
        "$defs": {"count": {"type": "integer", "minimum": 1}},
        "properties": {"n": {"$ref": "#/$defs/count"}},
    }
    assert problem_with_value(schema, {"n": 2}) is None
    assert problem_with_value(schema, {"n": 0}) is not None


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"pattern": "("}, {"$ref": "#/nope"}])
def test_what_is_no_schema_is_refused(schema: dict[str, JsonValue]) -> None:
    """R-8.5: an unusable answer schema is refused when it is given, not when it is answered."""
    with pytest.raises(Invalid):
        check_schema(schema)
