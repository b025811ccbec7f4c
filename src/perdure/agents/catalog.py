"""The agents and tools of a process, and how they are found from the settings (decision 18).

A user's module holds an `AgentRegistry`; the settings name it as "pkg.module:registry"; the
`Catalog` joins all of them for the engine. Versions are explicit, and never silently replaced.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, cast, runtime_checkable

from pydantic import JsonValue, ValidationError

from perdure.agents.loop.base import ModelPlanner
from perdure.agents.merging import UserMerger
from perdure.engine.ports import ApprovalNotice, HostedAgent, Planner, ToolGrant
from perdure.engine.schema import check_schema
from perdure.protocol.agents import AgentCard, Skill
from perdure.protocol.decisions import Publish
from perdure.protocol.errors import Conflict, Invalid
from perdure.protocol.fields import Reducers, StateField, named, reducers_of
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.tools import ToolSpec
from perdure.protocol.wording import first_problem
from perdure.tools.api import Tool
from perdure.tools.registry import ToolRegistry
from perdure.tools.usercode import UserCode

TellT = TypeVar("TellT", bound=Callable[[ApprovalNotice], object])

_REFERENCE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@runtime_checkable
class _Attachable(Protocol):
    def attach(self, code: UserCode) -> None: ...


@runtime_checkable
class _BringsTools(Protocol):
    @property
    def own_tools(self) -> Sequence[Tool]: ...


def loop_agent(
    agent_id: str,
    version: str,
    planner: Planner,
    *,
    tools: Sequence[str | ToolGrant] = (),
    name: str = "",
    description: str = "",
    owner: str | None = None,
    skills: Sequence[Skill] = (),
    input_schema: dict[str, JsonValue] | None = None,
    output_schema: dict[str, JsonValue] | None = None,
    permissions: Sequence[str] = (),
    model_retry: RetryPolicy | None = None,
    models: int = 1,
    code_digest: str | None = None,
    replaces: Sequence[str] = (),
    continues: bool = False,
    deny_tells_planner: bool = False,
    publishes: str | None = None,
    state: Sequence[StateField] = (),
) -> HostedAgent:
    """Return an agent version: a planner with its tools, by name or with a grant of its own.

    `state` declares the fields that its decisions and tools write (`WriteField`,
    `ToolContext.write`) and its planner sees as `context.fields`.
    `publishes` is the topic to which its answers are published. `replaces` names versions that no worker serves any more: their runs end with a code instead of
    waiting for one for ever; with `continues` each goes on as a new run of this version. Raises Invalid (`invalid`) for an id, version or text that a card does not take, or when a
    tool is granted twice. For a built-in planner, how models are retried and what the answer
    must fit are one setting, whether given here or to the planner.
    """
    grants = tuple(ToolGrant(name=tool) if isinstance(tool, str) else tool for tool in tools)
    _check_grants(agent_id, grants)
    if isinstance(planner, ModelPlanner):
        models = len(planner.models)
        planner = _fitted(planner, output_schema, model_retry)
        output_schema = planner.output_schema
        model_retry = planner.model_retry
    try:
        card = AgentCard(
            agent_id=agent_id,
            version=version,
            name=name or agent_id,
            description=description,
            owner=owner,
            skills=tuple(skills),
            input_schema=input_schema,
            output_schema=output_schema,
            tools=tuple(grant.name for grant in grants),
            permissions=tuple(permissions),
            code_digest=code_digest,
        )
    except ValidationError as error:
        place, text = first_problem(error)
        where = ".".join(place)
        raise Invalid(f"agent {agent_id!r}: {where}: {text}", field=where) from None
    declared, reducers = _fields(agent_id, state)
    return HostedAgent(
        card=card,
        planner=planner,
        grants=grants,
        model_retry=model_retry or RetryPolicy(),
        models=models,
        replaces=tuple(replaces),
        continues=continues,
        deny_tells_planner=deny_tells_planner,
        publishes=None if publishes is None else _topic(agent_id, publishes),
        fields=declared,
        merger=UserMerger(reducers) if reducers else None,
    )


def _fields(
    agent_id: str, fields: Sequence[StateField]
) -> tuple[Mapping[str, StateField], Reducers]:
    for one in fields:
        if one.json_schema is not None:
            check_schema(one.json_schema, field="state")
    try:
        return named(fields), reducers_of(fields)
    except ValueError as error:
        raise Invalid(f"agent {agent_id!r}: {error}", field="state") from None


def _topic(agent_id: str, name: str) -> str:
    try:
        return Publish(topic=name).topic
    except ValidationError:
        raise Invalid(f"agent {agent_id!r}: {name!r} is no topic", field="publishes") from None


def _check_grants(agent_id: str, grants: Sequence[ToolGrant]) -> None:
    names = [grant.name for grant in grants]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Invalid(f"agent {agent_id!r}: tool {twice!r} is granted twice", field="tools")


def _fitted(
    planner: ModelPlanner,
    output_schema: dict[str, JsonValue] | None,
    model_retry: RetryPolicy | None,
) -> "_ModelPlanner":
    if output_schema is not None and output_schema != planner.output_schema:
        planner = planner.for_output(output_schema)
    if model_retry is not None and model_retry != planner.model_retry:
        planner = planner.for_retry(model_retry)
    return cast("_ModelPlanner", planner)


class _ModelPlanner(ModelPlanner, Planner):
    """The type of a built-in planner: one that asks models and decides."""


class AgentRegistry:
    """What a user's module offers: agents, and the tools they may be granted."""

    def __init__(self) -> None:
        self.tools = ToolRegistry()
        self.tells_approvers: Callable[[ApprovalNotice], object] | None = None
        self._agents: dict[tuple[str, str], HostedAgent] = {}

    def on_approval(self, tell: TellT) -> TellT:
        """Register and return the function, sync or async, that tells approvers of an approval.

        It may be called twice for the same one, and again when others may decide. What it raises
        is recorded, and it is tried again. Raises Conflict when another one is there.
        """
        if self.tells_approvers not in {None, tell}:
            raise Conflict("another function tells approvers already")
        self.tells_approvers = tell
        return tell

    def add(self, *agents: HostedAgent) -> None:
        """Register agent versions; raise Conflict when a version is there already."""
        for agent in agents:
            key = (agent.card.agent_id, agent.card.version)
            if self._agents.get(key, agent) is not agent:
                raise Conflict(
                    f"agent {key[0]!r} {key[1]!r} is registered twice: give it a new version"
                )
            self._agents[key] = agent

    def add_tool(self, *tools: Tool) -> None:
        """Register tools; raises as `ToolRegistry.add` does."""
        self.tools.add(*tools)

    @property
    def agents(self) -> Sequence[HostedAgent]:
        """Return the agent versions in the order of their registration."""
        return tuple(self._agents.values())


class Catalog:
    """All agents and tools of this process. Implements the engine's `AgentCatalog`."""

    def __init__(self, registries: Iterable[AgentRegistry] = ()) -> None:
        self.tools = ToolRegistry()
        self._agents = AgentRegistry()
        self._by_key: dict[tuple[str, str], HostedAgent] = {}
        for registry in registries:
            self.include(registry)
        self.check()

    def include(self, registry: AgentRegistry) -> None:
        """Add what a registry offers; raise Conflict when two differ about a version."""
        for spec in registry.tools.specs():
            tool = registry.tools.get(spec.name, spec.version)
            if tool is not None:
                self.tools.add(tool)
        self._agents.add(*registry.agents)
        if registry.tells_approvers is not None:
            self._agents.on_approval(registry.tells_approvers)
        for agent in registry.agents:
            if isinstance(agent.planner, _BringsTools):
                self.tools.add(*agent.planner.own_tools)
        self._by_key = {
            (agent.card.agent_id, agent.card.version): agent for agent in self._agents.agents
        }

    @property
    def tells_approvers(self) -> Callable[[ApprovalNotice], object] | None:
        """Return the function that tells approvers, if a registry has one."""
        return self._agents.tells_approvers

    def check(self) -> None:
        """Raise Invalid when an agent is granted a tool or version that nobody registered."""
        for agent in self._agents.agents:
            for grant in agent.grants:
                if self.tools.find(grant.name, grant.version) is None:
                    version = f" version {grant.version!r}" if grant.version else ""
                    raise Invalid(
                        f"agent {agent.card.agent_id!r} {agent.card.version!r} is granted the tool "
                        f"{grant.name!r}{version}, which no registry has",
                        field="tools",
                    )

    def attach(self, code: UserCode) -> None:
        """Say where users' planners run in this process."""
        for agent in self._agents.agents:
            for part in (agent.planner, agent.merger):
                if isinstance(part, _Attachable):
                    part.attach(code)

    def find(self, agent_id: str, version: str) -> HostedAgent | None:
        """Return an agent version, or None."""
        return self._by_key.get((agent_id, version))

    def served(self) -> Sequence[HostedAgent]:
        """Return all agent versions."""
        return self._agents.agents

    def replaced(self) -> Mapping[tuple[str, str], HostedAgent]:
        """Return what took the place of versions that are gone and are not served here."""
        return {
            (agent.card.agent_id, version): agent
            for agent in self._agents.agents
            for version in agent.replaces
            if (agent.card.agent_id, version) not in self._by_key
        }

    def tool_specs(self) -> Sequence[ToolSpec]:
        """Return all tool versions."""
        return self.tools.specs()


def load_catalog(references: Iterable[str]) -> Catalog:
    """Return the catalog of the registries named "pkg.module:registry".

    Raises Invalid with the reference and what is wrong with it: its form, the module, the name,
    or what stands there. An error inside the user's module keeps its traceback as the cause.
    """
    return Catalog(load_registry(reference) for reference in dict.fromkeys(references))


def load_registry(reference: str) -> AgentRegistry:
    """Return the registry that a reference names; raises as `load_catalog` does."""
    if not _REFERENCE.fullmatch(reference):
        raise Invalid(
            f"agents: {reference!r} is not of the form 'package.module:registry'", field="agents"
        )
    module_name, _, path = reference.partition(":")
    found = _import(module_name, reference)
    for part in path.split("."):
        try:
            found = cast("object", getattr(found, part))
        except AttributeError:
            raise Invalid(
                f"agents: {reference!r}: {module_name} has no {path!r}", field="agents"
            ) from None
    if not isinstance(found, AgentRegistry):
        raise Invalid(
            f"agents: {reference!r} is a {type(found).__name__}, not an AgentRegistry",
            field="agents",
        )
    return found


def _import(module_name: str, reference: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            reason = f"there is no module {missing!r} on the path"
        else:
            reason = f"{module_name} needs the module {missing!r}, which is not installed"
        raise Invalid(f"agents: {reference!r}: {reason}", field="agents") from error
    except Exception as error:
        raise Invalid(
            f"agents: {reference!r}: importing {module_name} raised "
            f"{type(error).__name__}: {error}",
            field="agents",
        ) from error
