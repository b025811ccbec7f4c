"""Agents and tools of a process, and the references that name them in the settings."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.agents.catalog import AgentRegistry, Catalog, load_catalog, loop_agent
from perdure.agents.loop.isolated import IsolatedPlanner
from perdure.agents.loop.react import ReActPlanner
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.agents.models.scripted import ScriptedModel
from perdure.engine.ports import AgentCatalog, HostedAgent, ToolGrant
from perdure.protocol.decisions import Finish
from perdure.protocol.errors import Conflict, Invalid
from perdure.protocol.policies import RetryPolicy
from perdure.tools.decorator import tool
from perdure.tools.usercode import UserCode

PLANNER = ScriptedPlanner([Finish()])


@tool
def look(n: int) -> int:
    """Look something up."""
    return n


@tool(name="look", version="2")
def look_again(n: int) -> int:
    """Look something up, better."""
    return n + 1


def agent(version: str = "1", *tools: str | ToolGrant) -> HostedAgent:
    return loop_agent("a", version, PLANNER, tools=tools)


def registry_of(*agents: HostedAgent) -> AgentRegistry:
    registry = AgentRegistry()
    registry.add_tool(look, look_again)
    registry.add(*agents)
    return registry


def test_a_catalog_finds_exactly_the_registered_versions() -> None:
    """R-1.7, decision 18."""
    one, two = agent("1", "look"), agent("2")
    catalog: AgentCatalog = Catalog([registry_of(one, two)])
    assert catalog.find("a", "1") is one
    assert catalog.find("a", "2") is two
    assert catalog.find("a", "3") is None
    assert list(catalog.served()) == [one, two]
    assert [(spec.name, spec.version) for spec in catalog.tool_specs()] == [
        ("look", "1"),
        ("look", "2"),
    ]


def test_a_version_is_never_silently_replaced() -> None:
    registry = registry_of(agent())
    with pytest.raises(Conflict, match="registered twice"):
        registry.add(agent())
    with pytest.raises(Conflict, match="registered twice"):
        Catalog([registry_of(agent()), registry_of(agent())])


def test_the_same_registry_may_be_named_twice() -> None:
    registry = registry_of(agent())
    assert len(Catalog([registry, registry]).served()) == 1


@pytest.mark.parametrize("grant", ["nothing", ToolGrant(name="look", version="9")])
def test_a_grant_of_a_tool_that_nobody_registered_is_refused_with_its_name(
    grant: str | ToolGrant,
) -> None:
    with pytest.raises(Invalid, match="which no registry has"):
        Catalog([registry_of(agent("1", grant))])


def test_a_tool_may_come_from_another_registry() -> None:
    tools = AgentRegistry()
    tools.add_tool(look)
    agents = AgentRegistry()
    agents.add(agent("1", "look"))
    assert Catalog([agents, tools]).find("a", "1") is not None


def test_a_builder_takes_models_retries_and_output_from_its_planner() -> None:
    models = [ScriptedModel(["x"]), ScriptedModel(["y"])]
    retry = RetryPolicy(attempts_max=2)
    planner = ReActPlanner(models, model_retry=retry, output_schema={"type": "object"})
    hosted = loop_agent("a", "1", planner)
    assert (hosted.models, hosted.model_retry) == (2, retry)
    assert hosted.card.output_schema == {"type": "object"}
    assert hosted.planner is planner


def test_what_is_given_to_the_builder_holds_for_the_planner_too() -> None:
    planner = ReActPlanner([ScriptedModel(["x"])])
    retry = RetryPolicy(attempts_max=5)
    hosted = loop_agent("a", "1", planner, output_schema={"type": "string"}, model_retry=retry)
    assert isinstance(hosted.planner, ReActPlanner)
    assert hosted.planner.output_schema == hosted.card.output_schema == {"type": "string"}
    assert hosted.planner.model_retry == hosted.model_retry == retry
    assert planner.output_schema is None


@pytest.mark.parametrize(("agent_id", "version"), [("", "1"), ("a b", "1"), ("a", "")])
def test_an_id_or_version_that_no_card_takes_is_refused(agent_id: str, version: str) -> None:
    with pytest.raises(Invalid, match=r"agent"):
        loop_agent(agent_id, version, PLANNER)


def test_a_tool_granted_twice_is_refused() -> None:
    with pytest.raises(Invalid, match="granted twice"):
        agent("1", "look", ToolGrant(name="look", version="2"))


async def test_attaching_reaches_the_planners_of_users() -> None:
    def decide(_: object) -> Finish:
        return Finish(answer="theirs")

    planner = IsolatedPlanner(decide)
    catalog = Catalog([registry_of(loop_agent("a", "1", planner), agent("2"))])
    async with UserCode() as code:
        catalog.attach(code)
        assert planner.attached


# ---------------------------------------------------------------- references


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "shop_agents"
    folder.mkdir()
    (folder / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.startswith("shop_agents")]:
        del sys.modules[name]


GOOD = """
from perdure.agents.catalog import AgentRegistry, loop_agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.protocol.decisions import Finish

registry = AgentRegistry()
registry.add(loop_agent("shop", "1", ScriptedPlanner([Finish()])))


class Holder:
    inner = registry
"""


def test_a_reference_names_a_registry_in_a_module(package: Path) -> None:
    (package / "good.py").write_text(GOOD, encoding="utf-8")
    catalog = load_catalog(["shop_agents.good:registry", "shop_agents.good:Holder.inner"])
    assert catalog.find("shop", "1") is not None


@pytest.mark.parametrize(
    ("reference", "source", "said"),
    [
        ("shop_agents", "", "not of the form"),
        ("shop_agents.x:", "", "not of the form"),
        ("../shop:registry", "", "not of the form"),
        ("no_such_package.x:registry", "", "no module 'no_such_package' on the path"),
        ("shop_agents.missing:registry", "", "no module 'shop_agents.missing' on the path"),
        ("shop_agents.x:registry", "import no_such_library", "needs the module 'no_such_library'"),
        ("shop_agents.x:registry", "1 / 0", "raised ZeroDivisionError: division by zero"),
        ("shop_agents.x:registry", "def (", "raised SyntaxError"),
        ("shop_agents.x:registry", "other = 1", "has no 'registry'"),
        ("shop_agents.x:registry", "registry = []", "is a list, not an AgentRegistry"),
    ],
)
def test_a_reference_that_does_not_work_says_why(
    package: Path, reference: str, source: str, said: str
) -> None:
    (package / "x.py").write_text(source, encoding="utf-8")
    with pytest.raises(Invalid) as caught:
        load_catalog([reference])
    assert said in caught.value.message
    assert reference in caught.value.message
