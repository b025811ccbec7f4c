"""What the fuzzer is told about this API (`SCHEMATHESIS_HOOKS`): see `fuzz`.

Waits are short, streams are asked for as JSON, and half of the requests go to objects that exist,
whose ids the environment names.
"""

import json
import os
from typing import Any

import schemathesis

from tests.server.cases import has_odd_path

WAIT_S = 0.02
IDS_VARIABLE = "PERDURE_FUZZ_IDS"

_ids: dict[str, str] = json.loads(os.environ.get(IDS_VARIABLE, "{}"))
_counts = {"cases": 0}
_hook: Any = schemathesis.__dict__["hook"]


@_hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Shorten waits, ask for JSON, and aim every second request at what exists."""
    del context, kwargs
    _counts["cases"] += 1
    query: dict[str, Any] = case.query or {}
    if _is_long(query.get("wait")):
        query["wait"] = WAIT_S
    if "Accept" not in (case.headers or {}):
        case.headers = {**(case.headers or {}), "Accept": "application/json"}
    parameters: dict[str, Any] = case.path_parameters or {}
    if _counts["cases"] % 2 and not has_odd_path(case):
        parameters.update({name: _ids[name] for name in parameters if name in _ids})


def _is_long(value: object) -> bool:
    try:
        return WAIT_S < float(str(value)) <= 60
    except ValueError:
        return False
