"""What is not known of the effects of a relative whose row cannot be read (R-7.7, R-9.4)."""

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Ask, ChildRequest, Decision, Spawn
from perdure.store.reader import RunFilter
from perdure.testing.embedded import call, embedded, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.rows import Rows
from tests.flow.till import COMPENSATE, Till, follows, forked, key_of
from tests.flow.world import database_at

LOST = "UPDATE runs SET options = ! WHERE run_id = ?"


async def test_an_unreadable_relative_of_one_child_holds_nothing_of_another(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: no payment was refunded of the children that were read after the one it is of."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    both = tuple(ChildRequest(agent_id="buyer", key=key) for key in "ab")
    script = (Spawn(children=both), Ask(title="?"))

    def decide(context: PlannerContext) -> Decision:
        return script[min(len(context.turns), 1)]

    agents = [follows(call("charge")), scripted("boss", decide)]
    async with (
        database_at(url) as database,
        embedded(database, agents, tools=zoo.registry) as engine,
    ):
        parent = await engine.submit("boss")
        await engine.wait_waiting(parent)
        where = RunFilter(parent_run_id=parent)
        first, second = await engine.core.reader.list_runs(None, where, after=None, limit=9)
        beside = await forked(engine, first.facts.run_id)
        await engine.wait_terminal(beside)
        Rows(url).damage(LOST, beside, b"{")
        await engine.cancel(parent, options=COMPENSATE)
        await engine.wait_terminal(parent)
        assert till.refunds == [await key_of(engine, second.facts.run_id)]
