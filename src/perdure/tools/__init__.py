"""What agents can call: the tool API, the registry and the invocation."""

from perdure.tools.agent_tool import agent_as_tool
from perdure.tools.api import (
    ForeignTool,
    Isolation,
    Operation,
    Performed,
    Returned,
    Tool,
    ToolContext,
    ToolError,
    ToolUnavailable,
    failed,
    not_happened,
    partial,
    pending,
    succeeded,
)
from perdure.tools.decorator import FunctionTool, tool
from perdure.tools.openai import from_openai, to_openai
from perdure.tools.registry import ToolRegistry
from perdure.tools.runner import LocalToolRunner

__all__ = [
    "ForeignTool",
    "FunctionTool",
    "Isolation",
    "LocalToolRunner",
    "Operation",
    "Performed",
    "Returned",
    "Tool",
    "ToolContext",
    "ToolError",
    "ToolRegistry",
    "ToolUnavailable",
    "agent_as_tool",
    "failed",
    "from_openai",
    "not_happened",
    "partial",
    "pending",
    "succeeded",
    "to_openai",
    "tool",
]
