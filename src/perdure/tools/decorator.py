"""Python functions as tools: `@tool` reads type hints and docstring, sync or async (R-5.2)."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from pydantic import JsonValue, TypeAdapter, ValidationError

from perdure.protocol.failures import FailureCode
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import SideEffect
from perdure.protocol.tools import ToolSpec
from perdure.protocol.wording import sentence_of
from perdure.tools.api import Isolation, Operation, Performed, Returned, ToolContext, failed
from perdure.tools.docstrings import describe
from perdure.tools.signatures import (
    Inputs,
    context_parameter,
    hints_of,
    inputs_of,
    output_of,
    output_schema_of,
)

P = ParamSpec("P")
R = TypeVar("R")

DESCRIPTION_CHARACTERS_MAX = 10_000

ONCE = RetryPolicy(attempts_max=1)


class FunctionTool(Generic[P, R]):
    """A function with its declaration; calling it calls the function."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        spec: ToolSpec,
        inputs: Inputs,
        output: TypeAdapter[Any] | None,
        lookup: Operation | None,
        compensate: Operation | None,
        isolation: Isolation,
    ) -> None:
        self.function = function
        self.spec = spec
        self.lookup = lookup
        self.compensate = compensate
        self.isolation: Isolation = isolation
        self.call = _operation(function, inputs, output)
        self.import_path = f"{function.__module__}:{function.__qualname__}"
        functools.update_wrapper(cast("Any", self), function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, as in a unit test."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.spec.name} {self.spec.version}>"


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    version: str = "1",
    description: str | None = None,
    side_effect: SideEffect | Literal["read", "write", "external"] = SideEffect.READ,
    idempotent: bool | None = None,
    timeout_s: float | None = None,
    retry: RetryPolicy = ONCE,
    compensation: str | None = None,
    permission: str | None = None,
    risk: Literal["low", "medium", "high"] = "low",
    rate_limit_per_minute: int | None = None,
    parallel: bool = True,
    trusted: bool = False,
    unknown_outcome: Literal["ask", "tell_planner"] = "ask",
    isolation: Isolation = "thread",
    lookup: Callable[..., object] | None = None,
    compensate: Callable[..., object] | None = None,
    compensate_idempotent: bool = False,
    input_schema: dict[str, JsonValue] | None = None,
    output_schema: dict[str, JsonValue] | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(
    function: Callable[..., object] | None = None,
    /,
    *,
    isolation: Isolation = "thread",
    lookup: Callable[..., object] | None = None,
    compensate: Callable[..., object] | None = None,
    **declared: Any,
) -> Any:
    """Make a tool of a function, with or without arguments to the decorator.

    Name and description come from the function unless given; `lookup(effect_key)` tells what
    became of an earlier execution (it may also take a ToolContext) and returns what a tool
    returns, `not_happened()`, or None when it cannot say. `compensate(performed)` undoes a call when
    a cancel asks for it (it may also take a ToolContext, whose `effect_key` is its own); with
    `compensate_idempotent` it may be run again after a crash. Raises TypeError for a function whose
    parameters JSON cannot give, ValueError for a declaration that contradicts itself.
    """

    def decorate(function: Callable[..., object]) -> FunctionTool[..., object]:
        return _make(function, isolation, lookup, compensate, declared)

    return decorate if function is None else decorate(function)


def _make(
    function: Callable[..., object],
    isolation: Isolation,
    lookup: Callable[..., object] | None,
    compensate: Callable[..., object] | None,
    declared: dict[str, Any],
) -> FunctionTool[..., object]:
    hints = hints_of(function)
    described = describe(function)
    inputs = inputs_of(function, hints, described)
    output = output_of(hints)
    given = {name: value for name, value in declared.items() if value is not None}
    given.setdefault("name", function.__name__)
    given.setdefault("description", described.text[:DESCRIPTION_CHARACTERS_MAX])
    given.setdefault("input_schema", inputs.schema)
    given.setdefault("retry", ONCE)
    if output is not None:
        given.setdefault("output_schema", output_schema_of(output))
    spec = ToolSpec(**given, has_lookup=lookup is not None, has_compensate=compensate is not None)
    if spec.has_compensate and spec.side_effect is SideEffect.READ:
        raise ValueError(f"{spec.name}: a tool that only reads leaves nothing to compensate")
    if spec.compensate_idempotent and not spec.has_compensate:
        raise ValueError(f"{spec.name}: compensate_idempotent says nothing without compensate")
    if isolation == "process":
        _check_importable(function, spec)
    return FunctionTool(
        function,
        spec=spec,
        inputs=inputs,
        output=output,
        lookup=None if lookup is None else _lookup_operation(lookup),
        compensate=None if compensate is None else _compensate_operation(compensate),
        isolation=isolation,
    )


def _check_importable(function: Callable[..., object], spec: ToolSpec) -> None:
    if spec.trusted:
        raise ValueError(f"{spec.name}: a trusted tool runs inline, not in a process")
    if "<locals>" in function.__qualname__ or function.__module__ == "__main__":
        raise ValueError(
            f"{spec.name}: a child process cannot import {function.__qualname__}; "
            "define it at the top of a module"
        )


def _operation(
    function: Callable[..., object], inputs: Inputs, output: TypeAdapter[Any] | None
) -> Operation:
    if inspect.iscoroutinefunction(function):
        coroutine_function = cast("Callable[..., Coroutine[Any, Any, object]]", function)

        async def run_async(context: ToolContext, args: JsonValue) -> object:
            bound = _bind(inputs, context, args)
            if isinstance(bound, Returned):
                return bound
            return _dump(output, await coroutine_function(**bound))

        return Operation(run_async, is_async=True)

    def run(context: ToolContext, args: JsonValue) -> object:
        bound = _bind(inputs, context, args)
        return bound if isinstance(bound, Returned) else _dump(output, function(**bound))

    return Operation(run, is_async=False)


def _bind(inputs: Inputs, context: ToolContext, args: JsonValue) -> dict[str, Any] | Returned:
    try:
        return inputs.bind(context, args)
    except ValidationError as error:
        problems = [
            f"/{'/'.join(map(str, problem['loc']))}: {sentence_of(problem)}"
            for problem in error.errors(include_url=False, include_input=False)[:5]
        ]
        return failed("; ".join(problems), code=FailureCode.TOOL_ARGUMENT_INVALID)


def _dump(output: TypeAdapter[Any] | None, value: object) -> object:
    """Turn dataclasses, dates and the like into JSON types by the declared type."""
    if output is None or isinstance(value, Returned):
        return value
    return output.dump_python(value, mode="json", warnings="none")


def _lookup_operation(lookup: Callable[..., object]) -> Operation:
    context_name = context_parameter(lookup, hints_of(lookup))

    def run(context: ToolContext, _: JsonValue) -> object:
        extra = {} if context_name is None else {context_name: context}
        return lookup(context.effect_key, **extra)

    return Operation(run, is_async=inspect.iscoroutinefunction(lookup))


def _compensate_operation(compensate: Callable[..., object]) -> Operation:
    context_name = context_parameter(compensate, hints_of(compensate))

    def run(context: ToolContext, args: JsonValue) -> object:
        extra = {} if context_name is None else {context_name: context}
        return compensate(Performed(**cast("dict[str, Any]", args)), **extra)

    return Operation(run, is_async=inspect.iscoroutinefunction(compensate))
