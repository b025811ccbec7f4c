"""The default planner (ReAct): the model calls tools until it answers without a call."""

from perdure.agents.loop.base import ModelPlanner
from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Decision, Finish


class ReActPlanner(ModelPlanner):
    """One model request a step: calls become tool calls, a reply without calls is the answer."""

    async def next_step(self, context: PlannerContext) -> Decision:
        """Return the next decision; raises PlannerFailure as its models do."""
        spoken = await self.speak(context, tools=self.offered(context))
        acted = self.acted(context, spoken)
        if acted is not None:
            return acted
        return Finish(answer=self.answer_of(context, spoken.reply.text), model_uses=spoken.uses)
