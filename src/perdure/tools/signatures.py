"""The JSON Schemas of a Python function, from its type hints and docstring.

The input model keeps its fields under made-up names with the parameter's name as alias, so that a
parameter may be called `schema`, `copy` or `_x`.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PydanticUserError,
    TypeAdapter,
    create_model,
)
from pydantic.json_schema import GenerateJsonSchema

from perdure.engine.ports import ToolOutcome
from perdure.protocol.tools import ToolResult
from perdure.tools.api import Returned, ToolContext
from perdure.tools.docstrings import Described

_SAYS_MORE = (Returned, ToolResult, ToolOutcome)


class _PlainSchema(GenerateJsonSchema):
    """No made-up titles, no warnings about defaults that JSON cannot hold."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 (as declared by pydantic)

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a title that repeats the name says nothing."""
        return False


@dataclass(frozen=True, slots=True)
class Inputs:
    """How a function takes its arguments: the model, its fields' parameters, the context's name."""

    model: type[BaseModel]
    parameters: dict[str, str]
    context: str | None
    schema: dict[str, JsonValue]

    def bind(self, context: ToolContext, args: JsonValue) -> dict[str, Any]:
        """Return keyword arguments; raise pydantic's ValidationError for unfit ones.

        A parameter that was not sent is left out, so that the function's own default applies.
        """
        model = self.model.model_validate(args)
        bound = {self.parameters[name]: getattr(model, name) for name in model.model_fields_set}
        if self.context is not None:
            bound[self.context] = context
        return bound


def hints_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return a function's type hints; raise TypeError when one cannot be resolved."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{function.__qualname__}: a type hint cannot be resolved: {error}"
        ) from None


def context_parameter(function: Callable[..., object], hints: dict[str, Any]) -> str | None:
    """Return the name of the parameter that wants the ToolContext, or None."""
    names = [
        name for name in inspect.signature(function).parameters if _is_context(hints.get(name, Any))
    ]
    if len(names) > 1:
        raise TypeError(f"{function.__qualname__}: only one parameter may be a ToolContext")
    return names[0] if names else None


def inputs_of(
    function: Callable[..., object], hints: dict[str, Any], described: Described
) -> Inputs:
    """Return how a function takes its arguments; raise TypeError for what JSON cannot give."""
    context = context_parameter(function, hints)
    fields: dict[str, Any] = {}
    parameters: dict[str, str] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            raise TypeError(f"{function.__qualname__}: *args and **kwargs have no schema")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"{function.__qualname__}: {name} is positional-only")
        if name == context:
            continue
        field_name = f"p{len(fields)}"
        parameters[field_name] = name
        fields[field_name] = _field(name, parameter, hints.get(name, Any), described)
    model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    schema = model.model_json_schema(by_alias=True, schema_generator=_PlainSchema)
    schema.pop("title", None)
    schema.setdefault("properties", {})
    return Inputs(model, parameters, context, schema)


def _field(name: str, parameter: inspect.Parameter, hint: Any, described: Described) -> Any:
    extra: dict[str, Any] = {"alias": name}
    told = any(getattr(note, "description", None) for note in getattr(hint, "__metadata__", ()))
    if not told and described.parameters.get(name):
        extra["description"] = described.parameters[name]
    default = ... if parameter.default is parameter.empty else parameter.default
    return (Annotated[hint, Field(**extra)], default)


def output_of(hints: dict[str, Any]) -> TypeAdapter[Any] | None:
    """Return the adapter of a structured return type; None when the hint promises no structure."""
    hint = _without_helpers(hints.get("return", Any))
    if not _is_structured(hint):
        return None
    try:
        return TypeAdapter(hint)
    except PydanticUserError:  # a type that pydantic cannot describe promises nothing
        return None


def output_schema_of(adapter: TypeAdapter[Any]) -> dict[str, JsonValue]:
    """Return the JSON Schema of what a function returns."""
    return adapter.json_schema(mode="serialization", schema_generator=_PlainSchema)


def _is_context(hint: Any) -> bool:
    if hint is ToolContext:
        return True
    return any(_is_context(part) for part in get_args(hint)) if get_args(hint) else False


def _without_helpers(hint: Any) -> Any:
    if get_origin(hint) not in {typing.Union, types.UnionType}:
        return hint
    kept = tuple(part for part in get_args(hint) if part not in _SAYS_MORE)
    return typing.Union[kept] if kept else Any  # noqa: UP007 (the parts are known at run time only)


def _is_structured(hint: Any) -> bool:
    if isinstance(hint, type) and not get_args(hint):
        kind = cast("type[object]", hint)
        if issubclass(kind, _SAYS_MORE):
            return False
        return issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind) or _is_typed_dict(kind)
    return any(_is_structured(part) for part in get_args(hint))


def _is_typed_dict(kind: type[object]) -> bool:
    """Tell a TypedDict, of typing as of typing_extensions."""
    return dict in kind.__mro__ and hasattr(kind, "__required_keys__")
