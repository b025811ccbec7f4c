"""The tools of a process: several versions side by side, the newest is the last registered."""

from collections.abc import Iterable, Sequence

from perdure.protocol.errors import Conflict
from perdure.protocol.tools import ToolSpec
from perdure.tools.api import Tool
from perdure.tools.validate import compile_schema


class ToolRegistry:
    """Keeps tools by name and version. Sandbox-only ones too: the engine asks their declaration."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, dict[str, Tool]] = {}
        self._found: dict[tuple[str, str | None], ToolSpec] = {}
        """Declarations by name and version; under None the newest. Asked many times a step."""
        self.add(*tools)

    def add(self, *tools: Tool) -> None:
        """Register tools.

        Raises Conflict when a name and version has another definition already, Invalid for a
        schema that cannot be used. The same definition again replaces the code, not the order.
        """
        for tool in tools:
            self._add(tool)

    def _add(self, tool: Tool) -> None:
        spec = tool.spec
        compile_schema(spec.input_schema)
        if spec.output_schema is not None:
            compile_schema(spec.output_schema)
        versions = self._tools.setdefault(spec.name, {})
        known = versions.get(spec.version)
        if known is not None and known.spec.definition_digest != spec.definition_digest:
            raise Conflict(
                f"tool {spec.name} {spec.version} is registered with another definition: "
                "give it a new version"
            )
        versions[spec.version] = tool
        self._found[spec.name, spec.version] = spec
        self._found[spec.name, None] = versions[next(reversed(versions))].spec

    def get(self, name: str, version: str | None = None) -> Tool | None:
        """Return a tool; None for the version means the newest."""
        versions = self._tools.get(name)
        if not versions:
            return None
        if version is None:
            return versions[next(reversed(versions))]
        return versions.get(version)

    def find(self, name: str, version: str | None = None) -> ToolSpec | None:
        """Return a tool's declaration; None for the version means the newest."""
        return self._found.get((name, version))

    def specs(self) -> Sequence[ToolSpec]:
        """Return all versions of all tools, in the order of their names' registration."""
        return [tool.spec for versions in self._tools.values() for tool in versions.values()]
