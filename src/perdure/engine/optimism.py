"""Runs that work beside the active run of their thread and look at their end whether it moved.

The version of a thread's state is the position up to which it says something. An optimistic run
begins with the one that its start recorded (`history_position`); its answer is committed only while
nobody else has said anything since (R-11.1).
"""

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.view import RunView
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.states import RunState


def base_of(view: RunView) -> int | None:
    """Return the version of the thread that an optimistic run builds on; None for any other run."""
    if view.facts.options.multitask_strategy != "optimistic":
        return None
    return view.snapshot.history_position


async def conflict_of(core: Core, view: RunView, decision: Decision) -> Failure | None:
    """Return why a run cannot end as decided: its thread has moved since it began."""
    base = base_of(view)
    if base is None or not isinstance(decision, Finish):
        return None
    moved = await core.reader.moved_at(view.facts.thread_id, base, view.facts.run_id)
    if moved is None:
        return None
    return Failure(
        code=FailureCode.CONFLICT,
        reason=f"the thread says more at {moved}; the run began at {base}",
        stage=Stage.OUTPUT,
        details={"position": moved, "began_at": base},
    )


def guard_end(draft: Draft) -> None:
    """Have the store look once more, in the transaction that ends the run."""
    if draft.view.snapshot.state is RunState.SUCCEEDED:
        draft.unmoved_since = base_of(draft.view)
