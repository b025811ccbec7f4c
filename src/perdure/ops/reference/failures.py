"""The page of failure codes with the default recovery of each (R-2.4, R-10.1)."""

from perdure.protocol.failures import MEANING, Recovery, Stage

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
        parts.append(f"| `{code}` | {meaning} | {steps} |\n")
    return "".join(parts)
