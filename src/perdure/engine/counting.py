"""What a durable draft adds to the process's metrics, and to its log when it ends a run."""

import logging

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.protocol.events import RetryEvent, StateEvent

log = logging.getLogger(__name__)

_UNDONE = frozenset({"succeeded", "not_needed"})


def count_draft(core: Core, draft: Draft) -> None:
    """Count the calls, retries and ends of a draft that was committed."""
    metrics = core.metrics
    for tool, status in draft.ended_calls:
        metrics.engine.tool_calls.labels(tool, status).inc()
    for event in draft.events:
        if isinstance(event.data, RetryEvent):
            metrics.engine.retries.labels(subject=event.data.subject).inc()
    if draft.ends_run:
        snapshot = draft.view.snapshot
        metrics.runs.finished.labels(
            state=snapshot.state, code=snapshot.code or "", agent=draft.view.facts.agent_id
        ).inc()
        _count_undoing(core, draft)


def _count_undoing(core: Core, draft: Draft) -> None:
    """Count what became of undoing a run's effects; name each that stays though it was to go."""
    run_id = draft.view.facts.run_id
    for event in draft.events:
        effects = event.data.effects if isinstance(event.data, StateEvent) else None
        for effect in effects or ():
            told = effect.get("compensation")
            if told is None or told == "not_needed":
                continue
            core.metrics.engine.compensations.labels(status=told).inc()
            if told not in _UNDONE:
                log.warning(
                    "run %s: what %s did stays: undoing it: %s, external reference %s, call %s",
                    effect.get("run_id", run_id),
                    effect.get("tool"),
                    told,
                    effect.get("external_ref"),
                    effect.get("tool_call_id"),
                    extra={"run_id": run_id},
                )
