"""What becomes of a run whose attempt failed by an error, its author's or ours (R-10.2)."""

import logging
from collections.abc import Mapping
from typing import cast

from perdure.engine.blame import trace_in_code
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.ports import AuthorError, Chance
from perdure.engine.results import Known
from perdure.engine.steps import fail
from perdure.engine.values import short
from perdure.protocol.errors import TooLarge
from perdure.protocol.events import RetryEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import AttemptEnd, ParkedOn

ATTEMPT_RETRY = RetryPolicy(attempts_max=20, backoff_s=1.0, backoff_max_s=60.0)
log = logging.getLogger(__name__)


class CannotStore(Exception):
    """The store refused the data of a commit; the run must fail otherwise (decision 7)."""


def is_about_data(error: Exception) -> bool:
    """Tell whether the same would fail again: what was to be stored cannot be."""
    return isinstance(error, CannotStore | TooLarge)


def told_of(core: Core, run_id: str, error: Exception) -> str:
    """Return what callers are told of an error: all of the author's code's, of ours its type.

    The text of another error may hold what is none of theirs, as the address of a database; it
    stands in the log, under the id that they are told.
    """
    if isinstance(error, AuthorError) or is_about_data(error):
        return short(str(error))
    log_id = core.ids.new("log")
    log.error("%s: an attempt of %s failed", log_id, run_id, exc_info=error)
    return f"{type(error).__name__} in the runtime; its log tells more under {log_id}"


def draft_failed_attempt(
    draft: Draft, error: Exception, reason: str, known: Mapping[str, Known], chance: Chance
) -> None:
    """Draft another attempt later, or the end of the run when there were enough.

    `known` are results of calls that are not recorded yet.
    """
    view = draft.view
    failure = Failure(code=FailureCode.INTERNAL, reason=reason, stage=Stage.RUNTIME)
    if is_about_data(error):
        fail(draft, failure)
        return
    if view.faults >= view.facts.options.faults_max:
        if view.faults > 1:
            failure = Failure(
                code=FailureCode.RETRIES_EXHAUSTED,
                reason=f"{view.faults} attempts failed; the last one: {reason}",
                stage=Stage.RUNTIME,
            )
        fail(draft, failure, known=known)
        return
    delay_s = ATTEMPT_RETRY.delay_s(view.faults, chance.random())
    draft.add(
        RetryEvent(
            subject="attempt",
            failed=view.faults,
            failure=failure,
            delay_ms=round(delay_s * 1000),
        )
    )
    draft.release(AttemptEnd.ERROR, ParkedOn.RETRY)
    draft.ready_in_s = delay_s


def first_of(error: Exception) -> Exception:
    """Return the first plain error inside nested groups."""
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return error


def log_failed(run_id: str, error: Exception) -> None:
    """Log a failed attempt; of an error of the author's code the trace through that code alone."""
    if not isinstance(error, AuthorError):
        log.warning("attempt of %s failed", run_id, exc_info=error)
        return
    cause = error.__cause__
    trace = None if cause is None else trace_in_code(cause)
    shown = (type(cause), cause, trace) if cause is not None and trace is not None else None
    log.warning("attempt of %s failed: %s", run_id, error, exc_info=shown)
