"""Agents for the tests of the command line: one that answers, one that fails, one that asks."""

import threading

from perdure.agents.catalog import AgentRegistry, loop_agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.context import PlannerContext
from perdure.engine.ports import ToolGrant
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    Decision,
    Finish,
    GiveUp,
    ToolRequest,
    WriteField,
)
from perdure.protocol.fields import StateField
from perdure.tools import tool

REFERENCE = "tests.cli.shop:registry"


@tool(side_effect="write", idempotent=True, timeout_s=5, compensation="none is needed")
def ship(parcel: str) -> str:
    """Ship a parcel."""
    return f"shipped {parcel}"


@tool(side_effect="write", idempotent=False, compensation="none is needed", timeout_s=0.3)
def pay(amount: int) -> int:
    """Pay, and never come to tell."""
    threading.Event().wait()
    return amount


@tool(timeout_s=0.3)
def hang(number: int) -> int:
    """Never come back."""
    threading.Event().wait()
    return number


def _echo(context: PlannerContext) -> Decision:
    return Finish(answer=context.input)


def _fail(_: PlannerContext) -> Decision:
    return GiveUp(reason="as asked")


def _question(context: PlannerContext) -> Decision:
    if context.turns:
        return Finish(answer=context.turns[0].asks[0].value)
    return Ask(title="Which colour?", key="colour", payload={"of": "the shed\u202e"})


registry = AgentRegistry()
registry.add_tool(ship, pay, hang)
registry.add(
    loop_agent("echo", "1", ScriptedPlanner(_echo), description="Answers with its input."),
    loop_agent("fails", "1", ScriptedPlanner(_fail)),
    loop_agent("asks", "1", ScriptedPlanner(_question)),
    loop_agent(
        "ships",
        "1",
        ScriptedPlanner(
            [CallTools(calls=(ToolRequest(tool="ship", args={"parcel": "p1"}),)), Finish(answer=1)]
        ),
        tools=["ship"],
    ),
    loop_agent(
        "pays",
        "1",
        ScriptedPlanner(
            [CallTools(calls=(ToolRequest(tool="pay", args={"amount": 3}),)), Finish(answer=1)]
        ),
        tools=[ToolGrant(name="pay", approve="never")],
    ),
    loop_agent(
        "ships_much",
        "1",
        ScriptedPlanner(
            [
                CallTools(calls=(ToolRequest(tool="ship", args={"parcel": "p" * 9000 + "end"}),)),
                Finish(answer=1),
            ]
        ),
        tools=["ship"],
    ),
    loop_agent(
        "hangs",
        "1",
        ScriptedPlanner(
            [
                CallTools(
                    calls=tuple(ToolRequest(tool="hang", args={"number": n}) for n in range(17))
                ),
                Finish(answer=1),
            ]
        ),
        tools=["hang"],
    ),
    loop_agent(
        "keeps",
        "1",
        ScriptedPlanner([Finish(records=(WriteField(field="n", value=1),))]),
        state=[StateField(name="n", scope="agent", rule="add")],
    ),
)
