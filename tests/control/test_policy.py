"""The default rules: what runs, what asks, what is denied, and under which rule."""

from datetime import UTC, datetime

import pytest
from pydantic import JsonValue

from perdure.control.policy import RULES, DefaultPolicy
from perdure.engine.ports import HostedAgent, PolicyDecision, ToolGrant
from perdure.protocol.agents import AgentCard
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.policies import Timeouts
from perdure.protocol.runs import Caller, RunContext, RunFacts, RunOptions
from perdure.protocol.states import OnExpiry, SideEffect
from perdure.protocol.tools import ToolSpec
from perdure.protocol.values import Value


class FakePlanner:
    async def next_step(self, context: object) -> Decision:
        return Finish()


def agent_with(*grants: ToolGrant) -> HostedAgent:
    card = AgentCard(agent_id="a", version="1")
    return HostedAgent(card=card, planner=FakePlanner(), grants=grants)


def facts_of(
    *,
    roles: tuple[str, ...] = (),
    data_scope: tuple[str, ...] = (),
    claimed: tuple[str, ...] = (),
    approval_s: float | None = None,
    principal: str = "p",
) -> RunFacts:
    return RunFacts(
        run_id="run_1",
        tenant_id="default",
        agent_id="a",
        agent_version="1",
        thread_id="thr_1",
        root_run_id="run_1",
        parent_run_id=None,
        retry_of=None,
        input=Value(),
        context=RunContext(scope=claimed),
        options=RunOptions.model_validate({"timeouts": Timeouts(approval_s=approval_s)}),
        caller=Caller(tenant_id="default", principal=principal, roles=roles, data_scope=data_scope),
        trace_id="0" * 32,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        required_runtime=1,
        schema_version=1,
    )


def tool(
    side_effect: SideEffect = SideEffect.READ,
    *,
    permission: str | None = None,
    declared: bool = True,
) -> ToolSpec:
    return ToolSpec(
        name="t",
        input_schema={"type": "object"},
        side_effect=side_effect,
        permission=permission,
        idempotent=True if declared else None,
        timeout_s=5 if declared else None,
        compensation="none exists" if declared else None,
    )


GRANT = ToolGrant(name="t")
NEVER = ToolGrant(name="t", approve="never")
ALWAYS = ToolGrant(name="t", approve="always")
ARGS: JsonValue = {"n": 1}


def judged(spec: ToolSpec, *grants: ToolGrant, facts: RunFacts | None = None) -> PolicyDecision:
    return DefaultPolicy().judge(agent_with(*grants), facts or facts_of(), spec, ARGS)


@pytest.mark.parametrize(
    ("side_effect", "grant", "effect", "rule"),
    [
        (SideEffect.READ, GRANT, "allow", "read"),
        (SideEffect.WRITE, GRANT, "ask", "side-effect"),
        (SideEffect.EXTERNAL, GRANT, "ask", "side-effect"),
        (SideEffect.READ, NEVER, "allow", "read"),
        (SideEffect.WRITE, NEVER, "allow", "never-ask"),
        (SideEffect.EXTERNAL, NEVER, "allow", "never-ask"),
        (SideEffect.READ, ALWAYS, "ask", "always-ask"),
        (SideEffect.WRITE, ALWAYS, "ask", "always-ask"),
    ],
)
def test_side_effect_and_grant_decide(
    side_effect: SideEffect, grant: ToolGrant, effect: str, rule: str
) -> None:
    """R-4.2, decision 41."""
    decision = judged(tool(side_effect), grant)
    assert (decision.effect, decision.rule) == (effect, rule)


def test_a_tool_that_is_not_granted_is_denied_even_to_read() -> None:
    assert judged(tool()).rule == "not-granted"
    assert judged(tool(), ToolGrant(name="other")).effect == "deny"


def test_another_version_than_the_granted_one_is_denied() -> None:
    assert judged(tool(), ToolGrant(name="t", version="2")).rule == "other-version"
    assert judged(tool(), ToolGrant(name="t", version="1")).effect == "allow"


@pytest.mark.parametrize("grant", [GRANT, NEVER, ALWAYS])
def test_a_sandbox_only_tool_is_denied_whatever_the_grant_says(grant: ToolGrant) -> None:
    """R-5.11."""
    decision = judged(tool(SideEffect.WRITE, declared=False), grant)
    assert (decision.effect, decision.rule) == ("deny", "sandbox-only")
    assert "t changes something" in (decision.reason or "")
    for name in ("idempotent", "lookup", "timeout_s", "compensate", "compensation"):
        assert f"`{name}`" in (decision.reason or "")


def test_a_required_permission_is_held_by_role_or_data_scope_not_by_claim() -> None:
    spec = tool(permission="pay")
    assert judged(spec, GRANT).rule == "permission"
    assert judged(spec, GRANT, facts=facts_of(claimed=("pay",))).rule == "permission"
    assert judged(spec, GRANT, facts=facts_of(roles=("pay",))).effect == "allow"
    assert judged(spec, GRANT, facts=facts_of(data_scope=("pay",))).effect == "allow"


def test_the_local_caller_holds_the_scope_that_its_run_names() -> None:
    """R-14.1, R-5.1, decision 41: without authentication there is no other word on it."""
    spec = tool(permission="pay")
    assert judged(spec, GRANT, facts=facts_of(principal="local")).rule == "permission"
    named = facts_of(principal="local", claimed=("pay",))
    assert judged(spec, GRANT, facts=named).effect == "allow"


def test_a_claimed_scope_counts_only_where_all_callers_are_trusted() -> None:
    policy = DefaultPolicy(trust_context_scope=True)
    facts = facts_of(claimed=("pay",))
    decision = policy.judge(agent_with(GRANT), facts, tool(permission="pay"), ARGS)
    assert decision.effect == "allow"


def test_an_approval_expires_as_the_run_says_before_what_the_policy_says() -> None:
    policy = DefaultPolicy(approval_expires_s=60, on_expiry=OnExpiry.DENY)
    spec = tool(SideEffect.WRITE)
    decision = policy.judge(agent_with(GRANT), facts_of(), spec, ARGS)
    assert (decision.expires_in_s, decision.on_expiry) == (60, OnExpiry.DENY)
    decision = policy.judge(agent_with(GRANT), facts_of(approval_s=5), spec, ARGS)
    assert decision.expires_in_s == 5


def test_the_version_is_stable_and_changes_with_the_settings() -> None:
    assert DefaultPolicy().version == DefaultPolicy().version
    assert DefaultPolicy(trust_context_scope=True).version != DefaultPolicy().version
    assert judged(tool(), GRANT).version == DefaultPolicy().version


def test_rule_ids_are_unique() -> None:
    assert len({rule for rule, _, _ in RULES}) == len(RULES)
