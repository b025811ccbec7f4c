"""Takes one run of the analyst from its start to its end, and says what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from pydantic import JsonValue

from perdure.demo import publish
from perdure.demo.person import Person
from perdure.demo.timeline import Timeline
from perdure.demo.tools import REPORT_NAME, Place
from perdure.protocol.errors import Unavailable
from perdure.protocol.event_views import EventView
from perdure.protocol.runs import Run
from perdure.protocol.states import RunState, ToolCallStatus
from perdure.service.agents import list_agents
from perdure.service.artifacts import list_artifacts
from perdure.service.base import PAGE_LIMIT_MAX, Service
from perdure.service.events import as_view, follow_run, starting_point
from perdure.service.principal import LOCAL
from perdure.service.runs import RunRequest, create_run, get_run
from perdure.service.tool_calls import get_tool_call, list_tool_calls
from perdure.service.views import ToolCallView

REGISTERED_WITHIN_S = 60.0
LOOK_S = 0.5

_ASKING = frozenset({"approval_request", "interrupt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run."""

    agent_id: str
    region: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run. `publications` are distinct effects, `publish_executions` tries."""

    run: Run
    products: JsonValue
    artifact: str | None
    publications: int
    publish_executions: int
    calls: Sequence[ToolCallView]

    def document(self) -> dict[str, JsonValue]:
        """Return the document that `--json` prints. Money is text with exactly two decimals."""
        return {
            "run_id": self.run.run_id,
            "state": self.run.state,
            "error": None
            if self.run.error is None
            else {"code": self.run.error.code, "reason": self.run.error.reason},
            "products": self.products,
            "artifact": self.artifact,
            "publications": self.publications,
            "publish_executions": self.publish_executions,
        }


async def conduct(
    service: Service, order: Order, person: Person, timeline: Timeline, *, leave_waiting: bool
) -> Outcome:
    """Start the run, show its events, have questions answered, and return once it has ended.

    With `leave_waiting`, or when nothing can be typed here, it also returns when the run waits for
    a person.
    """
    await _registered(service, order.agent_id)
    request = RunRequest(
        input={"region": order.region, "task": "Which products fell most, last week?"},
        context=order.place.as_context(),
    )
    made = await create_run(service, LOCAL, order.agent_id, request)
    run_id = made.run.run_id
    timeline.say(f"run {run_id}: {order.agent_id} in {order.region}")
    async with anyio.create_task_group() as group:
        await _follow(_Following(service, run_id, person, timeline, group, leave_waiting))
        group.cancel_scope.cancel()
    return await _outcome(service, order, run_id)


async def _registered(service: Service, agent_id: str) -> None:
    """Return once a worker has registered the agent."""
    for _ in range(int(REGISTERED_WITHIN_S / 0.05)):
        if any(agent.agent_id == agent_id for agent in await list_agents(service, LOCAL)):
            return
        await anyio.sleep(0.05)
    raise Unavailable(f"no worker has registered {agent_id} within {REGISTERED_WITHIN_S:g} s")


@dataclass(slots=True)
class _Following:
    """The run on its way, and the question that is open at the moment."""

    service: Service
    run_id: str
    person: Person
    timeline: Timeline
    group: anyio.abc.TaskGroup
    leave_waiting: bool
    question: anyio.CancelScope | None = None
    was_shown: bool = False

    async def ask(self, interrupt_id: str) -> None:
        with anyio.CancelScope() as scope:
            self.question = scope
            if not await self.person.answer(self.service, interrupt_id):
                self.leave_waiting = True
            self.was_shown = True

    def take(self, event: EventView) -> None:
        data = event.data if isinstance(event.data, dict) else {}
        if event.type in _ASKING:
            interrupt_id = data.get("approval_id") or data.get("interrupt_id")
            self.group.start_soon(self.ask, str(interrupt_id))
        elif event.type == "resume" and self.question is not None:
            self.question.cancel()


async def _follow(run: _Following) -> None:
    clock = run.service.core.clock.monotonic
    began = clock()
    start = await starting_point(run.service, LOCAL, run.run_id, 0)
    async with follow_run(run.service, start) as feed:
        while not feed.ended:
            for encoded in await feed.read(wait_s=LOOK_S, limit=100):
                event = as_view(encoded)
                run.timeline.event(event, clock() - began)
                run.take(event)
            if run.leave_waiting and run.was_shown and await _waits(run):
                return


async def _waits(run: _Following) -> bool:
    return (await get_run(run.service, LOCAL, run.run_id)).state is RunState.WAITING_HUMAN


async def _outcome(service: Service, order: Order, run_id: str) -> Outcome:
    calls = (await list_tool_calls(service, LOCAL, run_id, after=None, limit=PAGE_LIMIT_MAX)).items
    artifacts = (
        await list_artifacts(service, LOCAL, run_id, after=None, limit=PAGE_LIMIT_MAX)
    ).items
    reports = [item.artifact_id for item in artifacts if item.name == REPORT_NAME]
    keys = {call.effect_key for call in calls if call.tool == "publish_report"}
    folder = order.place.published
    return Outcome(
        run=await get_run(service, LOCAL, run_id),
        products=await _products(service, calls),
        artifact=reports[-1] if reports else None,
        publications=sum(publish.lookup(folder, key) is not None for key in keys),
        publish_executions=sum(publish.executions(folder, key) for key in keys),
        calls=calls,
    )


async def _products(service: Service, calls: Sequence[ToolCallView]) -> JsonValue:
    """Return what the SQL tool found last: the figures themselves, not a planner's words."""
    found = [
        call
        for call in calls
        if call.tool == "falling_products" and call.status is ToolCallStatus.SUCCEEDED
    ]
    if not found:
        return []
    return (await get_tool_call(service, LOCAL, found[-1].tool_call_id)).output
