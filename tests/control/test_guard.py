"""A user's policy hook: whatever goes wrong with it denies."""

import threading
from typing import Any, cast

import pytest
from anyio.lowlevel import checkpoint
from pydantic import JsonValue

from perdure.control import guard
from perdure.control.guard import GuardedPolicy
from perdure.control.policy import DefaultPolicy
from perdure.engine.ports import PolicyDecision
from perdure.protocol.states import SideEffect
from tests.control.test_policy import ARGS, GRANT, agent_with, facts_of, tool


def judged_by(hook: Any, *, timeout_s: float = 5.0) -> PolicyDecision:
    policy = GuardedPolicy(hook, version="mine-1", timeout_s=timeout_s)
    return policy.judge(agent_with(GRANT), facts_of(), tool(), ARGS)


def saying(answer: object) -> Any:
    def hook(*_: Any) -> Any:
        return answer

    return hook


def raising(error: BaseException) -> Any:
    def hook(*_: Any) -> Any:
        raise error

    return hook


def wanting_nothing() -> str:
    return "allow"


async def asynchronous(*_: Any) -> str:
    await checkpoint()
    return "allow"


@pytest.mark.parametrize(
    "hook",
    [
        saying(None),
        saying(True),
        saying("yes"),
        saying(PolicyDecision(effect=cast("Any", "maybe"), rule="r", version="v")),
        saying(PolicyDecision(effect="allow", rule=cast("Any", 5), version="v")),
        saying(PolicyDecision(effect="ask", rule="r", version="v", expires_in_s=1e12)),
        saying(PolicyDecision(effect="ask", rule="r", version="v", escalate_after_s=1e12)),
        raising(ValueError("no")),
        raising(SystemExit(3)),
        wanting_nothing,
        asynchronous,
    ],
)
def test_a_hook_without_a_clear_answer_denies(hook: Any) -> None:
    decision = judged_by(hook)
    assert (decision.effect, decision.rule) == ("deny", "hook-failed")


@pytest.mark.parametrize("effect", ["allow", "ask", "deny"])
def test_a_clear_answer_counts_and_names_both_versions(effect: str) -> None:
    decision = judged_by(saying(effect))
    assert (decision.effect, decision.rule) == (effect, "hook")
    assert decision.version == f"mine-1+{DefaultPolicy().version}"


def test_a_hook_may_return_a_whole_decision_with_its_own_rule() -> None:
    own = PolicyDecision(effect="ask", rule="over-100", version="", approvers=("boss",))
    decision = judged_by(saying(own))
    assert (decision.rule, decision.approvers) == ("over-100", ("boss",))


def test_a_hook_cannot_grant_what_the_base_denies() -> None:
    policy = GuardedPolicy(saying("allow"), version="1")
    assert policy.judge(agent_with(), facts_of(), tool(), ARGS).rule == "not-granted"
    bare = tool(SideEffect.WRITE, declared=False)
    assert policy.judge(agent_with(GRANT), facts_of(), bare, ARGS).rule == "sandbox-only"


def test_a_hook_cannot_change_the_arguments() -> None:
    args: JsonValue = {"list": [1]}

    def hook(_agent: Any, _facts: Any, _spec: Any, shown: Any) -> Any:
        shown["list"].append(2)
        return "allow"

    policy = GuardedPolicy(hook, version="1", timeout_s=5.0)
    assert policy.judge(agent_with(GRANT), facts_of(), tool(), args).effect == "allow"
    assert args == {"list": [1]}


def test_a_hook_that_hangs_denies_in_time_and_keeps_at_most_three_threads() -> None:
    release, started = threading.Event(), threading.Semaphore(0)

    def hook(*_: Any) -> Any:
        started.release()
        release.wait()
        return "allow"

    policy = GuardedPolicy(hook, version="1", timeout_s=0.01)
    try:
        decisions = [policy.judge(agent_with(GRANT), facts_of(), tool(), ARGS) for _ in range(6)]
    finally:
        release.set()
    assert {decision.effect for decision in decisions} == {"deny"}
    for _ in range(3):
        assert started.acquire(timeout=5)
    assert not started.acquire(blocking=False)


def test_a_hook_that_came_back_is_asked_again() -> None:
    release, back = threading.Event(), threading.Event()

    def hook(*_: Any) -> Any:
        if not release.is_set():
            release.wait()
            back.set()
        return "allow"

    policy = GuardedPolicy(hook, version="1", timeout_s=0.2)
    assert policy.judge(agent_with(GRANT), facts_of(), tool(), ARGS).effect == "deny"
    release.set()
    assert back.wait(5)
    assert policy.judge(agent_with(GRANT), facts_of(), tool(), ARGS).effect == "allow"


def test_slow_hooks_keep_the_loop_from_its_leases_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R-14.1, F44: after that calls are denied unasked, until the window is over."""
    monkeypatch.setattr(guard, "WAITED_S_MAX", 0.03)
    asked: list[object] = []

    def hook(*_: Any) -> Any:
        asked.append(None)
        threading.Event().wait(0.02)
        return "allow"

    policy = GuardedPolicy(hook, version="1", timeout_s=5.0)
    found = [policy.judge(agent_with(GRANT), facts_of(), tool(), ARGS) for _ in range(20)]
    assert 1 <= len(asked) <= 2
    assert [one.effect for one in found] == ["allow"] * len(asked) + ["deny"] * (20 - len(asked))
    assert "too slow" in found[-1].reason
    monkeypatch.setattr(guard, "WAITED_S_MAX", 60.0)
    assert policy.judge(agent_with(GRANT), facts_of(), tool(), ARGS).effect == "allow"
