"""Times that authors and callers give have bounds, told in words (R-10.4)."""

import math
from datetime import timedelta

import pytest
from pydantic import ValidationError

from perdure.agents.loop.isolated import IsolatedPlanner
from perdure.agents.models.port import ModelRequest
from perdure.control.policy import DefaultPolicy
from perdure.protocol.decisions import Ask, Decision
from perdure.protocol.durations import WAIT_MAX, checked_s
from perdure.protocol.policies import Budget

BAD = (-1.0, 0.0, math.inf, math.nan, 1e12)


def never(_: object) -> Decision:
    """Stand for a function that is never asked."""
    raise AssertionError("only the bounds of its time are looked at")


@pytest.mark.parametrize("wait", [timedelta(-1), timedelta(0), timedelta(days=367)])
def test_a_question_stands_more_than_no_time_and_at_most_366_days(wait: timedelta) -> None:
    """R-8.3: a time out of bounds is refused by name, before anybody is asked."""
    with pytest.raises(ValidationError, match="expires_in"):
        Ask(expires_in=wait)
    assert Ask(expires_in=WAIT_MAX).expires_in == WAIT_MAX
    assert Ask().expires_in is None


@pytest.mark.parametrize("seconds", BAD)
def test_times_out_of_bounds_are_refused_where_they_are_given(seconds: float) -> None:
    """R-10.4: what would end a call at once, never, or with an OverflowError cannot be set."""
    for make in (
        lambda: DefaultPolicy(approval_expires_s=seconds),
        lambda: IsolatedPlanner(never, timeout_s=seconds),
        lambda: ModelRequest(messages=(), timeout_s=seconds),
        lambda: ModelRequest(messages=(), idle_s=seconds),
    ):
        with pytest.raises(ValueError, match="more than 0 s and at most"):
            make()
    with pytest.raises(ValidationError, match="wall_time_s"):
        Budget(wall_time_s=seconds)


def test_no_time_at_all_is_allowed_where_it_means_at_once() -> None:
    """R-10.4: a grace may be none."""
    assert checked_s("a grace", 0, 5, may_be_zero=True) == 0
    with pytest.raises(ValueError, match="a grace is at least 0 s and at most 5 s, not -1 s"):
        checked_s("a grace", -1, 5, may_be_zero=True)
    with pytest.raises(ValueError, match="at most 366 days"):
        checked_s("a wait", math.nan, 366 * 86_400)
