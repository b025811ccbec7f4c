"""Making an agent of an async function (R-4.5): its card, its planner, and its steps' tools."""

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from perdure.agents.catalog import loop_agent
from perdure.agents.code.api import STEP, STEP_ONCE
from perdure.agents.code.session import CodeSession, Function
from perdure.agents.models.port import ModelClient
from perdure.engine.context import PlannerContext
from perdure.engine.ports import (
    HostedAgent,
    PlannerSession,
    SessionSurroundings,
    ToolGrant,
)
from perdure.protocol.agents import Skill
from perdure.protocol.decisions import Decision
from perdure.protocol.durations import WORK_S_MAX, checked_s
from perdure.protocol.errors import Invalid
from perdure.protocol.fields import StateField
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import SideEffect
from perdure.protocol.tools import ToolSpec
from perdure.tools.api import ForeignTool, Operation, Tool, ToolContext, ToolUnavailable
from perdure.tools.usercode import UserCode

ADVANCE_TIMEOUT_S_DEFAULT = 300.0
STEP_TIMEOUT_S_DEFAULT = 300.0
GRACE_S_DEFAULT = 1.0


def agent(
    agent_id: str,
    version: str,
    *,
    tools: Sequence[str | ToolGrant] = (),
    models: Sequence[ModelClient] = (),
    model_retry: RetryPolicy | None = None,
    name: str = "",
    description: str = "",
    owner: str | None = None,
    skills: Sequence[Skill] = (),
    input_schema: dict[str, JsonValue] | None = None,
    output_schema: dict[str, JsonValue] | None = None,
    permissions: Sequence[str] = (),
    replaces: Sequence[str] = (),
    continues: bool = False,
    publishes: str | None = None,
    state: Sequence[StateField] = (),
    timeout_s: float = ADVANCE_TIMEOUT_S_DEFAULT,
    grace_s: float = GRACE_S_DEFAULT,
) -> Callable[[Function], HostedAgent]:
    """Make an agent version of `async def function(ctx, input)`; see `agents.code.api`.

    `publishes` is the topic to which its answers are published. `models` are asked by `ctx.model`: the first, and the next ones after `model_retry` failures.
    `state` declares the fields that `ctx.write` and `ctx.read` take. `timeout_s` bounds the time that the function may take from one operation to the next. A call
    that policy denies is told to the function. Raises as `loop_agent` does.
    """

    def made(function: Function) -> HostedAgent:
        if not inspect.iscoroutinefunction(function):
            raise Invalid(f"agent {agent_id!r}: a code agent is an async function")
        retry = model_retry or RetryPolicy()
        planner = CodePlanner(
            function,
            models=tuple(models),
            model_retry=retry,
            timeout_s=timeout_s,
            grace_s=grace_s,
            fields={one.name: one for one in state},
        )
        return loop_agent(
            agent_id,
            version,
            planner,
            tools=(*tools, *_STEP_GRANTS),
            name=name,
            description=description or inspect.getdoc(function) or "",
            owner=owner,
            skills=skills,
            input_schema=input_schema,
            output_schema=output_schema,
            permissions=permissions,
            model_retry=retry,
            models=max(1, len(models)),
            code_digest=planner.digest,
            replaces=replaces,
            continues=continues,
            publishes=publishes,
            deny_tells_planner=True,
            state=state,
        )

    return made


class CodePlanner:
    """Drives a function. A session for each attempt keeps it in memory; the log is the truth."""

    def __init__(
        self,
        function: Function,
        *,
        models: tuple[ModelClient, ...],
        model_retry: RetryPolicy,
        timeout_s: float,
        grace_s: float,
        fields: Mapping[str, StateField],
    ) -> None:
        self.function = function
        self.digest = source_digest(function)
        self._models = models
        self._model_retry = model_retry
        self._timeout_s = checked_s("timeout_s", timeout_s, WORK_S_MAX)
        self._grace_s = checked_s("grace_s", grace_s, WORK_S_MAX, may_be_zero=True)
        self._fields = fields
        self._code: UserCode | None = None

    @property
    def own_tools(self) -> Sequence[Tool]:
        """The tools that stand for the steps of functions."""
        return STEP_TOOLS

    def attach(self, code: UserCode) -> None:
        """Say where the function runs: the user code of this process."""
        self._code = code

    def open(self, around: SessionSurroundings) -> PlannerSession:
        """Return a session for one attempt."""
        if self._code is None:
            raise RuntimeError("the agent was not attached to this process's user code")
        return CodeSession(
            self.function,
            self._code,
            around,
            digest=self.digest,
            models=self._models,
            model_retry=self._model_retry,
            timeout_s=self._timeout_s,
            grace_s=self._grace_s,
            fields=self._fields,
        )

    async def next_step(self, context: PlannerContext) -> Decision:
        """A code agent decides in a session only."""
        raise RuntimeError("open a session for each attempt")


def source_digest(function: Function) -> str:
    """Return the digest of a function's source, or of its byte code where there is none."""
    try:
        text = textwrap.dedent(inspect.getsource(function)).encode()
    except (OSError, TypeError):
        text = function.__code__.co_code
    return hashlib.sha256(text).hexdigest()


# ---------------------------------------------------------------- the steps' tools


def _not_here(context: ToolContext, args: JsonValue) -> object:
    raise ToolUnavailable("a step runs in the attempt of its own run only")


def _step_tool(name: str, what: str, *, idempotent: bool) -> Tool:
    spec = ToolSpec(
        name=name,
        description=f"A step of a code agent: a function of its own, {what}.",
        input_schema={
            "type": "object",
            "properties": {"args": {"type": "array"}},
            "required": ["args"],
            "additionalProperties": False,
        },
        side_effect=SideEffect.WRITE,
        idempotent=idempotent,
        timeout_s=STEP_TIMEOUT_S_DEFAULT,
        compensation="the author's own matter",
    )
    return ForeignTool(spec=spec, call=Operation(run=_not_here, is_async=False))


STEP_TOOLS: tuple[Tool, ...] = (
    _step_tool(STEP, "at least once", idempotent=True),
    _step_tool(STEP_ONCE, "at most once without a person", idempotent=False),
)
_STEP_GRANTS = tuple(ToolGrant(name=tool.spec.name, approve="never") for tool in STEP_TOOLS)
