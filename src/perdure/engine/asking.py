"""Questions to people that a decision opens."""

from perdure.engine.approvals import note_opened
from perdure.engine.draft import Draft
from perdure.engine.judging import Judge
from perdure.engine.ports import PolicyDecision
from perdure.engine.results import add_result, runtime_result
from perdure.engine.schema import check_schema
from perdure.engine.snapshot import OpenCall
from perdure.engine.steps import settle
from perdure.engine.values import short, shown
from perdure.protocol.codec import clean
from perdure.protocol.decisions import Ask
from perdure.protocol.events import ApprovalRequestEvent, InterruptEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.ids import INTERRUPT
from perdure.protocol.states import InterruptKind, ToolCallStatus
from perdure.protocol.tools import ToolSpec
from perdure.store.commits import CallUpdate, NewInterrupt


def request_approval(
    draft: Draft, tool_call_id: str, spec: ToolSpec, decision: PolicyDecision, judge: Judge
) -> None:
    """Draft the question whether a call may run, bound to its tool and arguments (R-8.3)."""
    call = draft.view.snapshot.open_calls[tool_call_id]
    expires_in_s = decision.expires_in_s or draft.view.facts.options.timeouts.approval_s
    interrupt_id = draft.ids.new(INTERRUPT)
    seq = draft.add(
        ApprovalRequestEvent(
            approval_id=interrupt_id,
            tool_call_id=tool_call_id,
            title=f"May {draft.view.agent_id} run {spec.name}?",
            requested_actions=(
                {
                    "tool_call_id": tool_call_id,
                    "tool": spec.name,
                    "version": spec.version,
                    "side_effect": spec.side_effect,
                    "args_digest": call.args_digest,
                },
            ),
            risk=spec.risk,
            reason=short(decision.reason),
            args_digest=call.args_digest,
            definition_digest=spec.definition_digest,
            approvers=decision.approvers,
            on_expiry=decision.on_expiry,
            notifies=judge.notifies,
            escalate_after_s=decision.escalate_after_s,
            escalate_to=decision.escalate_to,
        )
    )
    note_opened(draft, interrupt_id, judge.settings.principals)
    draft.new_interrupts.append(
        NewInterrupt(
            interrupt_id=interrupt_id,
            kind=InterruptKind.APPROVAL,
            opened_seq=seq,
            tool_call_id=tool_call_id,
            args_digest=call.args_digest,
            definition_digest=spec.definition_digest,
            expires_in_s=expires_in_s,
            on_expiry=decision.on_expiry,
        )
    )


def draft_ask(draft: Draft, decision: Ask) -> None:
    """Draft the question of a decision; its step waits for the answer."""
    add_question(draft, decision)
    settle(draft, retry_in_s=None)


def add_question(draft: Draft, decision: Ask) -> None:
    """Open a question to a person."""
    if decision.answer_schema is not None:
        check_schema(decision.answer_schema)
    payload = draft.keep(clean(decision.payload))
    interrupt_id = draft.ids.new(INTERRUPT)
    expires = decision.expires_in
    seq = draft.add(
        InterruptEvent(
            interrupt_id=interrupt_id,
            kind=decision.ask,
            key=decision.key,
            title=decision.title,
            payload=payload.inline,
            payload_ref=payload.ref,
            answer_schema=decision.answer_schema,
            on_expiry=decision.on_expiry,
            position=decision.position,
        )
    )
    draft.new_interrupts.append(
        NewInterrupt(
            interrupt_id=interrupt_id,
            kind=decision.ask,
            opened_seq=seq,
            key=decision.key,
            expires_in_s=expires.total_seconds() if expires is not None else None,
            on_expiry=decision.on_expiry,
        )
    )


def is_stale(call: OpenCall, spec: ToolSpec) -> bool:
    """Tell whether a call was approved with another definition of its tool."""
    approved = call.approved_definition
    return approved is not None and approved != spec.definition_digest


def ask_again(draft: Draft, call: OpenCall, spec: ToolSpec, judge: Judge) -> None:
    """Draft what comes of a stale approval, which no longer counts: a denial, or the question."""
    args = shown(call.args, call.args_ref if call.args is None else None)
    decision = judge.policy.judge(judge.agent, draft.view.facts, spec, args)
    if decision.effect == "deny":
        reason = decision.reason or f"rule {decision.rule}"
        outcome = runtime_result(ToolCallStatus.DENIED, FailureCode.POLICY_DENIED, reason)
        add_result(draft, call, outcome, by="policy")
        return
    request_approval(draft, call.tool_call_id, spec, decision, judge)
    draft.call_updates.append(
        CallUpdate(tool_call_id=call.tool_call_id, status=ToolCallStatus.AWAITING_APPROVAL)
    )
