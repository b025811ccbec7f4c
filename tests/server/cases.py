"""What is asked of generated requests."""

from typing import Any

from schemathesis import GenerationMode
from schemathesis.core.parameters import ParameterLocation


def has_odd_path(case: Any) -> bool:
    """Tell whether a parameter of the path was made not to fit: it is not replaced by a known one."""
    path = case.meta.components.get(ParameterLocation.PATH) if case.meta else None
    return path is not None and path.mode is GenerationMode.NEGATIVE
