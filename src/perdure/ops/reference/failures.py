"""The page of failure codes with the default recovery of each (R-2.4, R-10.1)."""

from perdure.protocol.failures import MEANING, FailureCode, Recovery, Stage

_HEAD = """\
# Failure codes

A failure of a run or of a call is `{code, reason, retryable, stage, details}`. `code` is for
programs: the list is closed, grows with releases, and a code never changes its meaning. `reason` is
for people. `stage` is the part of the loop in which it arose: %s.

The recoveries are tried from left to right; each is the runtime's own unless it says otherwise.

| recovery | what happens |
|---|---|
"""

_RECOVERIES: dict[Recovery, str] = {
    Recovery.RETRY: "tried again after a back-off with jitter, within its bound",
    Recovery.RETRY_IF_IDEMPOTENT: "tried again, with the same effect key, when the tool may be",
    Recovery.FALLBACK_MODEL: "the agent's next model is asked, when it has one",
    Recovery.TELL_PLANNER: "the planner sees it as the call's result and may decide otherwise",
    Recovery.COMPRESS: "the conversation is compressed (not done yet: the run fails at once)",
    Recovery.ASK_PERSON: "a person is asked; the run waits without a worker",
    Recovery.FAIL: "the run ends `failed` with this code",
}

_NOTES: dict[FailureCode, str] = {
    FailureCode.MODEL_TIMEOUT: "as MODEL_ERROR",
    FailureCode.MODEL_ERROR: "a failure that is not `retryable` fails the run at once",
    FailureCode.TOOL_UNAVAILABLE: "as often as the tool's `retry` says",
    FailureCode.TOOL_TIMEOUT: "as TOOL_UNAVAILABLE; of a call that changes something and must not "
    "be repeated the outcome is unknown: TOOL_OUTCOME_UNKNOWN",
    FailureCode.TOOL_ERROR: "a `ToolError` with `retryable=True` is tried again first, as "
    "TOOL_UNAVAILABLE",
    FailureCode.TOOL_OUTCOME_UNKNOWN: "the tool's `lookup` is asked first; a tool with "
    "`unknown_outcome` `tell_planner` asks nobody",
    FailureCode.BUDGET_EXCEEDED: "a child run over the budget is refused, and the planner told",
    FailureCode.POLICY_DENIED: "an agent with `deny_tells_planner`, and any code agent, is told "
    "instead; what a rule asks about waits for a person and is no denial",
    FailureCode.GUARDRAIL_BLOCKED: "not used yet",
    FailureCode.APPROVAL_TIMEOUT: "with `on_expiry` `deny` the planner is told",
    FailureCode.CHECKPOINT_INCOMPATIBLE: "a run whose log is damaged is put aside for repair",
    FailureCode.OUTPUT_INVALID: "the run of a code agent fails at once",
    FailureCode.QUOTA_EXCEEDED: "not used yet",
    FailureCode.AGENT_NOT_FOUND: "a child or handover to it is refused, and the planner told",
    FailureCode.INTERNAL: "as often as `max_attempts` says; then RETRIES_EXHAUSTED",
}
"""What the recoveries of a code leave open."""

_CODES_HEAD = """
Calls that are told to the planner within the correction budget (`corrections_max` invalid steps in
a row) fail the run when the budget is used up.

| code | meaning | default recovery |
|---|---|---|
"""


def failures_page() -> str:
    """Return the page."""
    stages = ", ".join(f"`{stage}`" for stage in Stage)
    parts = [_HEAD % stages]
    parts += [f"| `{recovery}` | {text} |\n" for recovery, text in _RECOVERIES.items()]
    parts.append(_CODES_HEAD)
    for code, (meaning, recoveries) in MEANING.items():
        steps = ", then ".join(f"`{recovery}`" for recovery in recoveries)
        note = f"; {_NOTES[code]}" if code in _NOTES else ""
        parts.append(f"| `{code}` | {meaning} | {steps}{note} |\n")
    return "".join(parts)
