"""The state of a run at a place of its log, as plain JSON for people and tools (R-7.4)."""

from dataclasses import asdict
from typing import cast

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from perdure.engine.core import Core
from perdure.engine.load import load_past
from perdure.engine.snapshot import RunSnapshot
from perdure.protocol.fields import held, read_values
from perdure.protocol.runs import RunRow


async def state_at(core: Core, row: RunRow, seq: int) -> dict[str, JsonValue]:
    """Return state, step, plan, agent state, turns, and what was open at a seq. Raises Damaged."""
    view = await load_past(core, row, seq)
    snapshot = view.snapshot
    found = {
        "state": snapshot.state,
        "code": snapshot.code,
        "step_index": snapshot.step_index,
        "agent_state": snapshot.agent_state,
        "fields": held(snapshot.writes, read_values(snapshot.fields_read)),
        "plan": list(snapshot.plan),
        "turns": [asdict(turn) for turn in view.turns],
        "open_calls": _open_calls(snapshot),
        "open_interrupts": {
            name: {"kind": item.kind, "tool_call_id": item.tool_call_id}
            for name, item in snapshot.open_interrupts.items()
        },
        "artifacts": snapshot.artifacts,
        "usage": {
            "model_calls": snapshot.model_calls,
            "tool_calls": snapshot.tool_calls,
            "input_tokens": snapshot.input_tokens,
            "output_tokens": snapshot.output_tokens,
            "cost": snapshot.cost,
        },
    }
    return cast("dict[str, JsonValue]", to_jsonable_python(found))


def _open_calls(snapshot: RunSnapshot) -> dict[str, dict[str, JsonValue]]:
    return {
        name: {"tool": call.tool, "status": call.status, "args_digest": call.args_digest}
        for name, call in snapshot.open_calls.items()
    }
