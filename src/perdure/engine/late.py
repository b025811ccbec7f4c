"""Results that came after their worker had lost the run: evidence, never merged (decision 27)."""

from perdure.engine.held import Finished
from perdure.engine.lease import Lease
from perdure.engine.values import keep
from perdure.engine.view import RunView
from perdure.protocol.errors import TooLarge
from perdure.store.requests import LateResult


def late_result(item: Finished, view: RunView, lease: Lease) -> LateResult:
    """Return the record of a late result; an output over the limit is left out."""
    result = item.outcome.result
    try:
        kept = keep(result.output)
    except TooLarge:
        kept = keep(None)
    return LateResult(
        run_id=view.facts.run_id,
        tool_call_id=item.call.tool_call_id,
        execution=item.execution,
        attempt=view.snapshot.attempt,
        epoch=lease.epoch,
        status=result.status,
        output=kept.inline,
        output_ref=kept.ref,
        external_ref=result.external_ref,
        step_index=item.call.step_index,
        blobs=kept.blobs,
    )
