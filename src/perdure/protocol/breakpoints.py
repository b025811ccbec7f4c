"""Where a run is to pause for whoever debugs it (R-8.4). A pause asks nothing and allows nothing."""

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from perdure.protocol.base import Model

BREAKPOINTS_MAX = 20
BREAKPOINTS_EVENT_NAME = "perdure.breakpoints"
"""Name of the custom event that replaces a run's breakpoints."""

Point = Literal["before_step", "after_step", "before_tool", "after_tool"]


class Breakpoint(Model):
    """A point to pause at.

    `before_step`: the step is decided, none of its calls has begun. `after_step`: all of its calls
    have results, and it is not over. `before_tool`: the call may run, and has not begun.
    `after_tool`: its result is recorded.
    """

    at: Point
    tool: str | None = Field(
        default=None, max_length=200, description="only for calls of this tool; absent: of any"
    )
    pointer: str | None = Field(
        default=None,
        max_length=500,
        pattern="^(/.*)?$",
        description="JSON Pointer into the arguments: pause only where they have `equals` there",
    )
    equals: JsonValue = None

    @model_validator(mode="after")
    def _about_a_tool(self) -> Self:
        if self.at in {"before_step", "after_step"} and (self.tool or self.pointer is not None):
            raise ValueError("tool and pointer are for before_tool and after_tool")
        return self

    def holds_for(self, tool: str, args: JsonValue, *, known: bool) -> bool:
        """Tell whether a call of these arguments is meant; arguments not at hand always are."""
        if self.tool is not None and self.tool != tool:
            return False
        if self.pointer is None or not known:
            return True
        found, value = _at(args, self.pointer)
        same_type = isinstance(value, bool) == isinstance(self.equals, bool)
        return found and same_type and value == self.equals


def _at(value: JsonValue, pointer: str) -> tuple[bool, JsonValue]:
    """Return whether there is a value at a JSON Pointer (RFC 6901), and the value."""
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isascii() and name.isdigit():
            if len(name) > 9 or int(name) >= len(value):
                return False, None
            value = value[int(name)]
        else:
            return False, None
    return True, value
