"""One measurement of W2 in a process of its own: reads what to do from stdin, prints what it saw.

W2 is a run of a thousand steps (`long`), one that dies at a step (`die`), the recovery of such a
run by a new process (`recover`), and a thread of many short runs (`thread`).
"""

import json
import os
import sys
import time
from typing import Any, Literal

import anyio
from pydantic import BaseModel, JsonValue

from perdure.agents.catalog import AgentRegistry, Catalog, loop_agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.bench.payloads import RESULT_BYTES, args_of, prose_of, result_of
from perdure.engine.context import PlannerContext
from perdure.engine.feed import wait_for_end
from perdure.engine.submit import RunOrder, submit_run
from perdure.ops.process import tune_interpreter
from perdure.ops.settings import Settings
from perdure.protocol.decisions import CallTools, Decision, Finish, ToolRequest
from perdure.protocol.runs import Caller, RunContext, RunOptions
from perdure.protocol.states import RunState
from perdure.runtime import Runtime, open_runtime
from perdure.tools import tool

LONG_STEPS = 1000
LEASE_S = 1.0
LIMIT_S = 300.0
LONG = "bench-w2"
TALK = "bench-talk"


class GrowthJob(BaseModel):
    """What to do. `steps`: how long the run is, or the step at which the process dies."""

    what: Literal["long", "die", "recover", "thread"]
    url: str
    steps: int = LONG_STEPS
    runs: int = 200


class GrowthSeen(BaseModel):
    """What was seen: the monotonic time of each step's decision, or of the first new action."""

    marks_s: list[float] = []
    acted_at_s: float = 0.0


class _Script:
    """The planner and tool of W2, and what they note."""

    def __init__(self, job: GrowthJob) -> None:
        self._job = job
        self.marks: list[float] = []

    def decide(self, context: PlannerContext) -> Decision:
        """Call the tool until the last step; note the time; die where the job says."""
        step = context.step_index
        self.marks.append(time.monotonic())
        if self._job.what == "die" and step == self._job.steps:
            os._exit(0)
        if step >= LONG_STEPS:
            return Finish(answer="done")
        return CallTools(calls=(ToolRequest(tool="figures", args=args_of(7, step)),))

    def figures(self, topic: str, page: int, text: str) -> dict[str, JsonValue]:
        """Return a page of figures."""
        del topic, text
        if self._job.what == "recover":
            _print(GrowthSeen(acted_at_s=time.monotonic()))
        return result_of(page)


def _catalog(script: _Script) -> Catalog:
    registry = AgentRegistry()
    registry.add_tool(tool(name="figures", trusted=True)(script.figures))
    registry.add(loop_agent(LONG, "1", ScriptedPlanner(script.decide), tools=["figures"]))
    answer = Finish(answer=prose_of(RESULT_BYTES))
    registry.add(loop_agent(TALK, "1", ScriptedPlanner([answer]), tools=[]))
    return Catalog([registry])


async def _work(job: GrowthJob) -> GrowthSeen:
    lease = {"lease_ttl_s": LEASE_S, "heartbeat_s": LEASE_S / 4}
    settings = Settings.model_validate(
        {"db": {"url": job.url}, "worker": lease if job.what in {"die", "recover"} else {}}
    )
    script = _Script(job)
    async with open_runtime(settings, _catalog(script)) as runtime:
        tune_interpreter()
        match job.what:
            case "long" | "die":
                await _run(runtime, LONG, 7)
            case "recover":
                await anyio.sleep(LIMIT_S)  # the tool ends the process
            case "thread":
                thread_id: str | None = None
                for _ in range(job.runs):
                    thread_id = await _run(runtime, TALK, prose_of(RESULT_BYTES), thread_id)
    return GrowthSeen(marks_s=script.marks)


async def _run(
    runtime: Runtime, agent_id: str, run_input: JsonValue, thread_id: str | None = None
) -> str:
    """Carry out one run and return its thread."""
    order = RunOrder(
        agent_id=agent_id,
        input=run_input,
        context=RunContext(),
        options=RunOptions(max_steps=LONG_STEPS + 1, loop_limit=LONG_STEPS),
        caller=Caller(tenant_id="default", principal="bench"),
        fingerprint="",
        thread_id=thread_id,
    )
    core = runtime.service.core
    submitted = await submit_run(core, order)
    row = await wait_for_end(core, submitted.row.facts.run_id, LIMIT_S)
    assert row.hot.state is RunState.SUCCEEDED, row.hot.state
    return row.facts.thread_id


def _print(seen: GrowthSeen) -> None:
    document: dict[str, Any] = seen.model_dump()
    json.dump(document, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Do what stdin asks for."""
    job = GrowthJob.model_validate_json(sys.stdin.read())
    _print(anyio.run(_work, job))


if __name__ == "__main__":
    main()
