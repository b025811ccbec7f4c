"""What `@tool` reads from a function."""

from dataclasses import dataclass
from typing import Annotated, Any, cast

import pytest
from pydantic import BaseModel, Field, JsonValue, field_validator
from typing_extensions import TypedDict

from perdure.protocol.codec import digest
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import SideEffect
from perdure.protocol.tools import ToolSpec
from perdure.testing.tools import invocation_of
from perdure.tools import FunctionTool, Performed, Returned, ToolContext, failed, tool


class Item(BaseModel):
    name: str
    amount: int = Field(default=1, ge=1)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name == "unknown":
            raise ValueError("no such item")
        return name


@dataclass
class Order:
    id: str
    price: float


def properties(a_tool: FunctionTool[..., Any]) -> dict[str, dict[str, JsonValue]]:
    found = a_tool.spec.input_schema["properties"]
    assert isinstance(found, dict)
    return cast("dict[str, dict[str, JsonValue]]", found)


def call(a_tool: FunctionTool[..., Any], args: object) -> object:
    invocation = invocation_of(a_tool.spec, args)
    return a_tool.call.run(ToolContext(invocation), invocation.args)


def test_name_description_and_parameters_come_from_a_google_docstring() -> None:
    """R-5.2."""

    @tool
    def find(city: str, days: int = 3, *, unit: str | None = None) -> str:
        """Find the weather.

        It is a forecast.

        Args:
            city: where to look,
                in English
            days (int): how many days

        Returns:
            a text
        """
        return f"{city} {days} {unit}"

    assert find.spec.name == "find"
    assert find.spec.description == "Find the weather.\n\nIt is a forecast."
    assert find.spec.side_effect is SideEffect.READ
    assert properties(find)["city"] == {
        "type": "string",
        "description": "where to look, in English",
    }
    assert properties(find)["days"]["default"] == 3
    assert find.spec.input_schema["required"] == ["city"]
    assert find.spec.input_schema["additionalProperties"] is False


def test_sphinx_parameters_are_read_too() -> None:
    @tool
    def find(city: str, days: int) -> None:
        """Find it.

        :param city: where
            to look
        :param int days: how many
        :returns: nothing
        """

    assert find.spec.description == "Find it."
    assert properties(find)["city"]["description"] == "where to look"
    assert properties(find)["days"]["description"] == "how many"


def test_annotated_fields_win_over_the_docstring() -> None:
    @tool
    def find(days: Annotated[int, Field(ge=1, description="from the field")]) -> None:
        """Find it.

        Args:
            days: from the docstring
        """

    assert properties(find)["days"] == {
        "type": "integer",
        "minimum": 1,
        "description": "from the field",
    }


def test_the_context_is_injected_and_not_in_the_schema() -> None:
    @tool
    def who(name: str, context: ToolContext) -> str:
        return f"{name} {context.effect_key}"

    assert list(properties(who)) == ["name"]
    assert call(who, {"name": "ada"}) == "ada key-1"


def test_parameters_may_have_any_python_name() -> None:
    @tool
    def odd(schema: int, copy: int, _private: int, model_config: int = 4) -> list[int]:
        return [schema, copy, _private, model_config]

    assert list(properties(odd)) == ["schema", "copy", "_private", "model_config"]
    assert call(odd, {"schema": 1, "copy": 2, "_private": 3}) == [1, 2, 3, 4]


def test_models_arrive_as_models() -> None:
    @tool
    def buy(items: list[Item]) -> int:
        return sum(item.amount for item in items)

    assert call(buy, {"items": [{"name": "a"}, {"name": "b", "amount": 2}]}) == 3


def test_a_validator_of_the_users_that_refuses_is_an_invalid_argument() -> None:
    @tool
    def buy(item: Item) -> int:
        return item.amount

    refused = call(buy, {"item": {"name": "unknown"}})
    assert isinstance(refused, Returned)
    assert refused.code is FailureCode.TOOL_ARGUMENT_INVALID
    assert "/item/name" in refused.reason
    assert "no such item" in refused.reason


def test_a_default_that_json_cannot_hold_still_applies() -> None:
    marker = object()

    @tool
    def check(value: object = marker) -> bool:
        return value is marker

    assert call(check, {}) is True


def test_a_structured_return_type_becomes_the_output_schema_and_is_converted() -> None:
    """R-5.2."""

    @tool
    def buy() -> Order | Returned:
        return Order("o1", 2.5)

    @tool
    def many() -> list[Order]:
        return [Order("o1", 2.5)]

    assert buy.spec.output_schema is not None
    assert buy.spec.output_schema["required"] == ["id", "price"]
    assert call(buy, {}) == {"id": "o1", "price": 2.5}
    assert call(many, {}) == [{"id": "o1", "price": 2.5}]


def test_typed_dicts_are_structured_and_plain_types_are_not() -> None:
    class Row(TypedDict):
        id: int

    @tool
    def row() -> Row:
        return {"id": 1}

    @tool
    def number() -> float:
        return 1.0

    @tool
    def anything() -> Returned:
        return failed("no")

    assert row.spec.output_schema is not None
    assert number.spec.output_schema is None
    assert anything.spec.output_schema is None


def test_a_tool_is_still_a_function() -> None:
    @tool(name="math.double", version="2")
    def double(value: int) -> int:
        """Double it."""
        return 2 * value

    assert double(4) == 8
    assert double.__doc__ == "Double it."
    assert (double.spec.name, double.spec.version) == ("math.double", "2")


def test_the_declaration_is_kept_as_given() -> None:
    """R-5.1."""

    def find(effect_key: str) -> str:
        return effect_key

    @tool(
        side_effect="external",
        idempotent=False,
        timeout_s=3,
        compensation="none exists",
        permission="mail.send",
        risk="high",
        rate_limit_per_minute=10,
        parallel=False,
        unknown_outcome="tell_planner",
        lookup=find,
    )
    async def send(text: str) -> str:
        return text

    spec = send.spec
    assert spec.side_effect is SideEffect.EXTERNAL
    assert (spec.idempotent, spec.timeout_s, spec.risk) == (False, 3, "high")
    assert (spec.has_lookup, spec.parallel, spec.sandbox_only) == (True, False, False)
    assert send.call.is_async


def test_a_tool_that_can_undo_its_calls_says_so() -> None:
    """R-5.1, R-5.11: that it can be undone is said by `compensate` too."""

    def undo(performed: Performed) -> None:
        del performed

    declared: dict[str, Any] = {"side_effect": "write", "idempotent": True, "timeout_s": 1}

    def make(**more: Any) -> FunctionTool[..., Any]:
        def act() -> None: ...

        return cast("FunctionTool[..., Any]", tool(**{**declared, **more})(act))

    spec = make(name="a", compensate=undo, compensate_idempotent=True).spec
    assert (spec.has_compensate, spec.compensate_idempotent, spec.sandbox_only) == (
        True,
        True,
        False,
    )
    plain = ToolSpec(name="a", input_schema={})
    known = plain.model_dump(
        mode="json", exclude={"agent", "has_compensate", "compensate_idempotent"}
    )
    assert plain.definition_digest == digest(known)  # a digest of before stays what it was
    with pytest.raises(ValueError, match="only reads"):
        make(name="a", side_effect="read", compensate=undo)
    with pytest.raises(ValueError, match="without compensate"):
        make(name="a", compensate_idempotent=True)


def test_functions_that_json_cannot_call_are_refused() -> None:
    def stars(*values: int) -> None: ...
    def positional(value: int, /) -> None: ...

    for function in (stars, positional):
        with pytest.raises(TypeError):
            tool(function)


def test_a_local_function_cannot_run_in_a_process() -> None:
    with pytest.raises(ValueError, match="top of a module"):

        @tool(isolation="process")
        def local() -> None: ...
