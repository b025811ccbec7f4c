"""What a durable draft adds to the process's metrics."""

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.protocol.events import RetryEvent


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
