"""What a run may use, checked before it is spent (R-4.3, R-4.4)."""

from perdure.engine.fold import add_use
from perdure.engine.view import RunView
from perdure.protocol.events import ChildUse
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.policies import Budget

_NAMES = ("model_calls", "tokens", "output_tokens", "cost", "wall_time_s", "context_tokens")
_NO_LIMITS = (None,) * len(_NAMES)


def before_planning(view: RunView, *, worked_s: float) -> Failure | None:
    """Return why the run may not take another step; None when it may.

    `worked_s` is how long the run has worked so far, its waiting for people left out.
    """
    options, snapshot = view.facts.options, view.snapshot
    if snapshot.step_index - snapshot.first_step >= options.max_steps:
        return Failure(
            code=FailureCode.MAX_STEPS,
            reason=f"the run has taken its {options.max_steps} steps",
            stage=Stage.PLANNING,
        )
    budget = options.budget
    limits = (
        budget.model_calls,
        budget.tokens,
        budget.output_tokens,
        budget.cost,
        budget.wall_time_s,
        budget.context_tokens,
    )
    if limits == _NO_LIMITS:
        return None
    used = used_in_tree(view)
    spent = (
        used.model_calls or 0,
        used.tokens or 0,
        used.output_tokens or 0,
        used.cost or 0.0,
        worked_s,
        snapshot.context_tokens,
    )
    for name, so_far, limit in zip(_NAMES, spent, limits, strict=True):
        if limit is not None and so_far >= limit:
            return _over_budget(name, so_far, limit)
    return None


def calls_left(view: RunView) -> int | None:
    """Return how many more tool calls the budget allows; None without a limit."""
    limit = view.facts.options.budget.tool_calls
    return None if limit is None else max(0, limit - (used_in_tree(view).tool_calls or 0))


def calls_used_up(view: RunView) -> Failure:
    """Return the failure of a run that asks for a call when none is left."""
    limit = view.facts.options.budget.tool_calls or 0
    return _over_budget("tool_calls", used_in_tree(view).tool_calls or 0, limit)


def used_in_tree(view: RunView) -> ChildUse:
    """Return what the run and all below it used, and what is kept for children that are open."""
    snapshot = view.snapshot
    used = ChildUse(
        model_calls=snapshot.model_calls,
        tool_calls=snapshot.tool_calls,
        tokens=snapshot.input_tokens + snapshot.output_tokens,
        output_tokens=snapshot.output_tokens,
        cost=snapshot.cost,
    )
    if snapshot.children_use is not None:
        used = add_use(used, snapshot.children_use)
    for child in snapshot.open_children.values():
        used = add_use(used, child.use)
    return used


def share_for_child(view: RunView, wanted: Budget, among: int) -> Budget | Failure:
    """Return the budget of a child, taken from what the run has left (R-14.3).

    What `wanted` leaves open is an equal share of it among `among` children, rounded up. The
    failure tells of a limit of which nothing is left; without tool calls a child may still answer.
    """
    limits, used = view.facts.options.budget, used_in_tree(view)
    shares: dict[str, float | None] = {}
    for name in ("model_calls", "tool_calls", "tokens", "output_tokens", "cost"):
        limit, asked = getattr(limits, name), getattr(wanted, name)
        if limit is None:
            shares[name] = asked
            continue
        left = max(0, limit - (getattr(used, name) or 0))
        if left == 0 and name != "tool_calls":
            return _over_budget(name, limit - left, limit)
        equal = left / among if name == "cost" else -(-left // among)
        shares[name] = equal if asked is None else min(asked, left)
    return wanted.model_copy(update=shares)


def over_limit(*limits: tuple[str, int, int]) -> Failure | None:
    """Return why a child cannot be started: the first (name, used, limit) that is reached."""
    for name, used, limit in limits:
        if used >= limit:
            return Failure(
                code=FailureCode.BUDGET_EXCEEDED,
                reason=f"the limit of {limit} on {name} is reached",
                stage=Stage.PLANNING,
                details={"limit": name, "used": used, "max": limit},
            )
    return None


def repeated(view: RunView, tool: str, tool_call_id: str) -> Failure | None:
    """Return LOOP_DETECTED when an open call is one too many with the same arguments."""
    limit = view.facts.options.loop_limit
    args_digest = view.snapshot.open_calls[tool_call_id].args_digest
    if view.snapshot.repeats.get(f"{tool}:{args_digest}", 0) <= limit:
        return None
    return Failure(
        code=FailureCode.LOOP_DETECTED,
        reason=f"{tool} was called {limit} times with the same arguments: `options.loop_limit`, "
        "which may be raised for an agent that polls",
        stage=Stage.PLANNING,
        details={"tool": tool, "args_digest": args_digest},
    )


def _over_budget(name: str, used: float, limit: float) -> Failure:
    return Failure(
        code=FailureCode.BUDGET_EXCEEDED,
        reason=f"the budget of {limit:g} {name} is used up",
        stage=Stage.PLANNING,
        details={"budget": name, "used": used, "limit": limit},
    )
