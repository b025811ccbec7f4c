"""Registry, schema checks and the OpenAI format."""

import pytest
from pydantic import JsonValue

from perdure.protocol.errors import Conflict, Invalid
from perdure.protocol.states import SideEffect
from perdure.protocol.tools import ToolSpec
from perdure.tools import (
    ForeignTool,
    Operation,
    ToolRegistry,
    from_openai,
    to_openai,
    tool,
)
from perdure.tools.openai import openai_names
from perdure.tools.validate import SchemaChecks


def foreign(schema: dict[str, JsonValue]) -> ForeignTool:
    spec = ToolSpec(name="foreign", input_schema=schema)
    return ForeignTool(spec=spec, call=Operation(lambda _, args: args, is_async=False))


def test_versions_live_side_by_side_and_the_newest_is_the_last_registered() -> None:
    """R-5.2."""

    @tool(name="t", version="2")
    def second(a: int) -> int:
        return a

    @tool(name="t", version="1")
    def first(a: int) -> int:
        return a

    registry = ToolRegistry([second, first])
    assert registry.find("t") is first.spec
    assert registry.find("t", "2") is second.spec
    assert registry.find("t", "3") is None
    assert registry.find("u") is None
    assert list(registry.specs()) == [second.spec, first.spec]


def test_another_definition_under_the_same_version_is_refused() -> None:
    def t(a: int) -> int:
        return a

    registry = ToolRegistry([tool(t)])
    registry.add(tool(t))
    with pytest.raises(Conflict):
        registry.add(tool(description="other")(t))
    assert len(registry.specs()) == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "https://example.com/schema.json"},
        {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
        {"pattern": "("},
    ],
)
def test_a_schema_that_cannot_be_used_or_points_outside_is_refused(
    schema: dict[str, JsonValue],
) -> None:
    with pytest.raises(Invalid):
        ToolRegistry([foreign(schema)])


def test_a_sandbox_only_tool_registers() -> None:
    """R-5.11."""

    @tool(side_effect="write")
    def careless() -> None: ...

    found = ToolRegistry([careless]).find("careless")
    assert found is not None
    assert found.sandbox_only


def test_problems_name_the_place_by_json_pointer_and_are_capped() -> None:
    """R-5.3."""
    schema: dict[str, JsonValue] = {
        "type": "object",
        "properties": {
            "a/b": {"type": "array", "items": {"type": "integer"}},
            "when": {"type": "string", "format": "date"},
        },
    }
    checks, spec = SchemaChecks(), foreign(schema).spec
    assert checks.problem_with_args(spec, {"a/b": [1, 2], "when": "2026-01-02"}) is None
    problem = checks.problem_with_args(spec, {"a/b": [1, "x"]})
    assert problem is not None
    assert problem.startswith("/a~1b/1: ")
    assert "date" in (checks.problem_with_args(spec, {"when": "tomorrow"}) or "")
    many: list[JsonValue] = ["x" * 10_000] * 1000
    flood = checks.problem_with_args(spec, {"a/b": many})
    assert flood is not None
    assert len(flood) < 2500
    assert flood.endswith("and more")


def test_arguments_that_are_not_an_object_are_a_problem() -> None:
    checks = SchemaChecks()
    wrong: list[JsonValue] = ['{"a": 1}', [1], None, 3]
    for args in wrong:
        assert checks.problem_with_args(foreign({}).spec, args) is not None


def test_a_schema_of_the_same_name_that_changed_is_compiled_again() -> None:
    checks = SchemaChecks()
    assert checks.problem_with_args(foreign({"required": ["a"]}).spec, {}) is not None
    assert checks.problem_with_args(foreign({"required": []}).spec, {}) is None


def test_a_tool_survives_the_way_to_openai_and_back() -> None:
    """R-5.2."""

    @tool(name="find_it")
    def find(city: str) -> str:
        """Find it."""
        return city

    exported = to_openai(find.spec)
    back = from_openai(exported, side_effect=SideEffect.READ)
    assert (back.name, back.description) == ("find_it", "Find it.")
    assert back.input_schema == find.spec.input_schema


def test_an_imported_function_is_sandbox_only_until_somebody_vouches_for_it() -> None:
    flat: dict[str, JsonValue] = {"type": "function", "name": "f", "parameters": {}}
    assert from_openai(flat).sandbox_only
    assert not from_openai(flat, side_effect=SideEffect.READ).sandbox_only
    with pytest.raises(Invalid):
        from_openai({"type": "web_search"})
    with pytest.raises(Invalid):
        from_openai({"type": "function", "function": {"name": "not ok"}})


def test_two_tools_that_openai_cannot_tell_apart_are_refused() -> None:
    specs = [ToolSpec(name=name, input_schema={}) for name in ("a.b", "c")]
    assert openai_names(specs) == {"a_b": "a.b", "c": "c"}
    with pytest.raises(Invalid):
        openai_names([*specs, ToolSpec(name="a_b", input_schema={})])
