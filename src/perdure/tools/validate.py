"""The compiled schemas of a runner's tools: arguments before a call, output after it."""

import jsonschema_rs
from pydantic import JsonValue

from perdure.engine.schema import compile_schema, problem_with
from perdure.protocol.tools import ToolSpec


class SchemaChecks:
    """The compiled schemas of the tools of a runner. May be used from any thread."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[str, str], tuple[ToolSpec, jsonschema_rs.Validator]] = {}
        self._outputs: dict[tuple[str, str], tuple[ToolSpec, jsonschema_rs.Validator | None]] = {}

    def problem_with_args(self, spec: ToolSpec, args: JsonValue) -> str | None:
        """Return what is wrong with a tool's arguments, or None."""
        if not isinstance(args, dict):
            return "/: the arguments must be an object"
        key = (spec.name, spec.version)
        kept = self._inputs.get(key)
        if kept is None or (kept[0] is not spec and kept[0] != spec):
            kept = self._inputs[key] = (spec, compile_schema(spec.input_schema))
        return problem_with(kept[1], args)

    def problem_with_output(self, spec: ToolSpec, output: JsonValue) -> str | None:
        """Return what is wrong with a tool's output, or None; None too without a schema."""
        if spec.output_schema is None:
            return None
        key = (spec.name, spec.version)
        kept = self._outputs.get(key)
        if kept is None or (kept[0] is not spec and kept[0] != spec):
            kept = self._outputs[key] = (spec, compile_schema(spec.output_schema))
        return None if kept[1] is None else problem_with(kept[1], output)
