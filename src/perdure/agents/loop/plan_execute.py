"""Plan first, then work item by item, revise when something failed, answer at the end.

The plan is the run's own (durable, streamed); how often it was revised is the agent state. Each
step is one model request, told by a message that is not part of the lasting conversation.
"""

from collections.abc import Sequence
from typing import cast

from pydantic import JsonValue

from perdure.agents.loop.base import ModelPlanner, Spoken, nonsense, read_json
from perdure.agents.models.port import ChatMessage
from perdure.engine.context import PlannerContext, Turn
from perdure.protocol.codec import encode
from perdure.protocol.decisions import Decision, Finish, UpdatePlan
from perdure.protocol.events import PlanItem
from perdure.protocol.states import ToolCallStatus

ITEMS_MAX = 50
REVISIONS_MAX = 5
_TEXT_CHARACTERS_MAX = 1000

_FORM = 'Reply with nothing but JSON: {"items": ["first item", "second item"]}.'
_BAD = frozenset(
    {
        ToolCallStatus.FAILED,
        ToolCallStatus.TIMED_OUT,
        ToolCallStatus.DENIED,
        ToolCallStatus.UNKNOWN,
        ToolCallStatus.PARTIAL,
    }
)


class PlanAndExecutePlanner(ModelPlanner):
    """Makes a plan of at most 50 items and revises it at most five times."""

    async def next_step(self, context: PlannerContext) -> Decision:
        """Return the next decision; raises PlannerFailure as its models do."""
        if not context.plan:
            return await self._make_plan(context)
        if _went_wrong(context.turns) and _revisions(context.state) < REVISIONS_MAX:
            return await self._revise(context)
        if _current(context.plan) is None:
            return await self._finish(context)
        return await self._work(context)

    async def _make_plan(self, context: PlannerContext) -> Decision:
        names = ", ".join(tool.name for tool in context.tools) or "none"
        order = f"Make a short plan for this task before you act. Tools: {names}. {_FORM}"
        spoken = await self.speak(context, _user(order))
        items = _items(spoken)
        return UpdatePlan(plan=_started(items), model_uses=spoken.uses)

    async def _revise(self, context: PlannerContext) -> Decision:
        kept = tuple(item for item in context.plan if item.status in {"done", "dropped"})
        order = (
            f"The last action did not work. The plan is: {_plan_text(context.plan)}. "
            "Revise what is left to do; what is done stays and is not repeated in your reply. "
            f"{_FORM}"
        )
        spoken = await self.speak(context, _user(order))
        room = max(1, ITEMS_MAX - len(kept))
        return UpdatePlan(
            plan=kept + _started(_items(spoken)[:room]),
            state=_revised(context.state),
            model_uses=spoken.uses,
        )

    async def _work(self, context: PlannerContext) -> Decision:
        position = cast("int", _current(context.plan))
        plan = _marked(context.plan, position, "in_progress")
        order = (
            f"The plan is: {_plan_text(plan)}. Work on item {position + 1} only: "
            f"{plan[position].text}. Call tools as needed. "
            "When it is done, reply without a call, in a sentence that says what came of it."
        )
        spoken = await self.speak(context, _user(order), tools=self.offered(context))
        acted = self.acted(context, spoken, plan if plan != tuple(context.plan) else None)
        if acted is not None:
            return acted
        done = _started(_marked(plan, position, "done"))
        return UpdatePlan(plan=done, model_uses=spoken.uses)

    async def _finish(self, context: PlannerContext) -> Decision:
        order = f"The plan is carried out: {_plan_text(context.plan)}. Give the final answer."
        spoken = await self.speak(context, _user(order), tools=self.offered(context))
        acted = self.acted(context, spoken)
        if acted is not None:
            return acted
        return Finish(answer=self.answer_of(context, spoken.reply.text), model_uses=spoken.uses)


def _user(text: str) -> ChatMessage:
    return ChatMessage(role="user", text=text)


def _items(spoken: Spoken) -> tuple[PlanItem, ...]:
    """Return the items of a reply; raise PlannerFailure (MODEL_ERROR) when it is no plan."""
    found, value = read_json(spoken.reply.text)
    listed: JsonValue = value.get("items") if isinstance(value, dict) else value
    if not found or not isinstance(listed, list):
        raise nonsense(f"{spoken.reply.model}: the plan is not JSON of the form asked", spoken.uses)
    texts = [text for item in listed if (text := _text_of_item(item))]
    if not texts:
        raise nonsense(f"{spoken.reply.model}: the plan has no items", spoken.uses)
    return tuple(PlanItem(text=text) for text in texts[:ITEMS_MAX])


def _text_of_item(item: JsonValue) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    return text.strip()[:_TEXT_CHARACTERS_MAX] if isinstance(text, str) else ""


def _current(plan: Sequence[PlanItem]) -> int | None:
    """Return the position of the item at work, else of the first that is pending."""
    for wanted in ("in_progress", "pending"):
        for position, item in enumerate(plan):
            if item.status == wanted:
                return position
    return None


def _marked(plan: Sequence[PlanItem], position: int, status: str) -> tuple[PlanItem, ...]:
    return tuple(
        item.model_copy(update={"status": status}) if index == position else item
        for index, item in enumerate(plan)
    )


def _started(plan: Sequence[PlanItem]) -> tuple[PlanItem, ...]:
    position = _current(plan)
    return tuple(plan) if position is None else _marked(plan, position, "in_progress")


def _went_wrong(turns: Sequence[Turn]) -> bool:
    if not turns:
        return False
    return any(call.status in _BAD for call in turns[-1].calls)


def _revisions(state: JsonValue) -> int:
    count = state.get("revisions") if isinstance(state, dict) else 0
    return count if isinstance(count, int) else 0


def _revised(state: JsonValue) -> JsonValue:
    kept = state if isinstance(state, dict) else {}
    return {**kept, "revisions": _revisions(state) + 1}


def _plan_text(plan: Sequence[PlanItem]) -> str:
    return encode([{"text": item.text, "status": item.status} for item in plan]).decode()
