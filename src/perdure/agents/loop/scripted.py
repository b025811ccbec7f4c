"""A planner that replays decisions: for tests, benchmarks and offline use."""

from collections.abc import Callable, Sequence

from perdure.engine.context import PlannerContext
from perdure.engine.ports import PlannerFailure
from perdure.protocol.decisions import Decision
from perdure.protocol.failures import Failure, FailureCode, Stage


class ScriptedPlanner:
    """Decides by the step's index alone (or by a function), so recovery meets the same script.

    The index, not the number of turns: a step that only sleeps or revises the plan leaves no
    turn. Trusted code; runs on the engine's loop, and so does a function given to it.
    """

    def __init__(self, script: Sequence[Decision] | Callable[[PlannerContext], Decision]) -> None:
        self._script = script

    async def next_step(self, context: PlannerContext) -> Decision:
        """Return the decision of this step; raise PlannerFailure (INTERNAL) after the last."""
        if callable(self._script):
            return self._script(context)
        position = context.step_index
        if position < len(self._script):
            return self._script[position]
        reason = f"the script has {len(self._script)} decisions, not more"
        raise PlannerFailure(
            Failure(code=FailureCode.INTERNAL, reason=reason, stage=Stage.PLANNING)
        )
