"""Agents written as an async function whose operations are recorded and never done twice."""

from perdure.agents.code.agent import agent
from perdure.agents.code.api import Context, ModelAnswer
from perdure.agents.code.errors import (
    AgentFailed,
    ChildFailed,
    InterruptExpired,
    StateConflict,
    StepFailed,
    ToolFailed,
)
from perdure.protocol.events import PlanItem
from perdure.protocol.fields import Reducer, StateField

__all__ = [
    "AgentFailed",
    "ChildFailed",
    "Context",
    "InterruptExpired",
    "ModelAnswer",
    "PlanItem",
    "Reducer",
    "StateConflict",
    "StateField",
    "StepFailed",
    "ToolFailed",
    "agent",
]
