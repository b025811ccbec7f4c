"""Who may call which tool: the default rules. What no rule grants is denied.

Every decision names its rule and the version of the policy, which are recorded with the action
(R-14.1). The version is a digest of the rules, so it changes when they do and only then.
"""

from typing import Literal

from pydantic import JsonValue

from perdure.engine.ports import HostedAgent, PolicyDecision, ToolGrant
from perdure.protocol.base import PRINCIPAL_LOCAL
from perdure.protocol.codec import digest
from perdure.protocol.durations import WAIT_S_MAX, checked_s
from perdure.protocol.runs import RunFacts
from perdure.protocol.states import OnExpiry, SideEffect
from perdure.protocol.tools import ToolSpec

Effect = Literal["allow", "ask", "deny"]

RULES: tuple[tuple[str, Effect, str], ...] = (
    ("not-granted", "deny", "the agent is not granted this tool"),
    ("other-version", "deny", "the agent is granted another version of this tool"),
    ("sandbox-only", "deny", "the tool has a side effect and declares nothing about it"),
    ("permission", "deny", "the caller lacks the permission that the tool requires"),
    ("always-ask", "ask", "the agent's grant asks for every call"),
    ("never-ask", "allow", "the agent's grant lets it run unasked"),
    ("read", "allow", "the tool only reads"),
    ("side-effect", "ask", "the tool changes something"),
)
"""The rules in their order; the first that matches decides. Rule ids are stable."""

MISSING_OF_SANDBOX_ONLY = (
    "changes something and does not say what live agents need to know: declare `idempotent` or "
    "`lookup`, `timeout_s`, and `compensate` or `compensation`"
)
"""What is to be done about a tool with a side effect that declares nothing about it (R-5.11)."""

_BY_ID: dict[str, tuple[Effect, str]] = {rule: (effect, why) for rule, effect, why in RULES}


class DefaultPolicy:
    """The rules of decision 41: reads run, writes and external calls ask, unless granted.

    A permission is held by the caller's roles or data scope, as recorded from the credential.
    The scope that the request's body claims counts for the local caller, of whom no credential
    says otherwise (R-14.1, decision 41), and with `trust_context_scope` for all: only for an
    installation whose callers are all trusted. Runs on the engine's loop; touches nothing.
    """

    def __init__(
        self,
        *,
        trust_context_scope: bool = False,
        approval_expires_s: float | None = None,
        on_expiry: OnExpiry = OnExpiry.FAIL,
    ) -> None:
        self._trust_context_scope = trust_context_scope
        if approval_expires_s is not None:
            checked_s("approval_expires_s", approval_expires_s, WAIT_S_MAX)
        self._approval_expires_s = approval_expires_s
        self._on_expiry = on_expiry
        settings: list[JsonValue] = [trust_context_scope, approval_expires_s, on_expiry.value]
        rules: list[JsonValue] = [[rule, effect] for rule, effect, _ in RULES]
        self.version = f"default-{digest([rules, settings])[:12]}"

    def judge(
        self, agent: HostedAgent, facts: RunFacts, spec: ToolSpec, args: JsonValue
    ) -> PolicyDecision:
        """Return the decision of the first rule that matches."""
        rule = self._rule(agent, facts, spec)
        effect, why = _BY_ID[rule]
        if rule == "sandbox-only":
            why = f"{spec.name} {MISSING_OF_SANDBOX_ONLY}"
        grant = _grant_for(agent, spec)
        if effect != "ask" or grant is None:
            return PolicyDecision(effect=effect, rule=rule, version=self.version, reason=why)
        return PolicyDecision(
            effect="ask",
            rule=rule,
            version=self.version,
            reason=why,
            expires_in_s=facts.options.timeouts.approval_s or self._approval_expires_s,
            on_expiry=self._on_expiry,
            approvers=grant.approvers,
            escalate_after_s=grant.escalate_after_s,
            escalate_to=grant.escalate_to,
        )

    def _rule(self, agent: HostedAgent, facts: RunFacts, spec: ToolSpec) -> str:
        grant = _grant_for(agent, spec)
        barred = self._barred(grant, facts, spec)
        if barred is not None or grant is None:
            return barred or "not-granted"
        if grant.approve == "always":
            return "always-ask"
        if spec.side_effect is SideEffect.READ:
            return "read"
        return "never-ask" if grant.approve == "never" else "side-effect"

    def _barred(self, grant: ToolGrant | None, facts: RunFacts, spec: ToolSpec) -> str | None:
        if grant is None:
            return "not-granted"
        if grant.version not in {None, spec.version}:
            return "other-version"
        if spec.sandbox_only:
            return "sandbox-only"
        if spec.permission is not None and spec.permission not in self._rights(facts):
            return "permission"
        return None

    def _rights(self, facts: RunFacts) -> frozenset[str]:
        is_local = facts.caller.principal == PRINCIPAL_LOCAL
        claimed = facts.context.scope if is_local or self._trust_context_scope else ()
        return frozenset((*facts.caller.roles, *facts.caller.data_scope, *claimed))


def _grant_for(agent: HostedAgent, spec: ToolSpec) -> ToolGrant | None:
    return next((grant for grant in agent.grants if grant.name == spec.name), None)
