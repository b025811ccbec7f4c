"""What a run may use, checked before it is spent (R-4.3, R-4.4)."""

from perdure.engine.view import RunView
from perdure.protocol.failures import Failure, FailureCode, Stage


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
    spent = (
        ("model_calls", snapshot.model_calls, budget.model_calls),
        ("tokens", snapshot.input_tokens + snapshot.output_tokens, budget.tokens),
        ("output_tokens", snapshot.output_tokens, budget.output_tokens),
        ("cost", snapshot.cost, budget.cost),
        ("wall_time_s", worked_s, budget.wall_time_s),
        ("context_tokens", snapshot.context_tokens, budget.context_tokens),
    )
    for name, used, limit in spent:
        if limit is not None and used >= limit:
            return _over_budget(name, used, limit)
    return None


def calls_left(view: RunView) -> int | None:
    """Return how many more tool calls the budget allows; None without a limit."""
    limit = view.facts.options.budget.tool_calls
    return None if limit is None else max(0, limit - view.snapshot.tool_calls)


def calls_used_up(view: RunView) -> Failure:
    """Return the failure of a run that asks for a call when none is left."""
    limit = view.facts.options.budget.tool_calls or 0
    return _over_budget("tool_calls", view.snapshot.tool_calls, limit)


def repeated(view: RunView, tool: str, tool_call_id: str) -> Failure | None:
    """Return LOOP_DETECTED when an open call is one too many with the same arguments."""
    limit = view.facts.options.loop_limit
    args_digest = view.snapshot.open_calls[tool_call_id].args_digest
    if view.snapshot.repeats.get(f"{tool}:{args_digest}", 0) <= limit:
        return None
    return Failure(
        code=FailureCode.LOOP_DETECTED,
        reason=f"{tool} was called {limit} times with the same arguments",
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
