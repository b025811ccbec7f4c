"""Where in an author's own code an error arose, said without a path of this machine."""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, TracebackType

FRAMES_MAX = 1000

_FOREIGN = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def place_in_code(error: BaseException) -> str | None:
    """Return `file.py:12` for the innermost line of an author's code; None if there is none.

    The runtime's own lines, those of installed packages and of the standard library are not meant.
    """
    found = None
    for code, line, module in _frames(error.__traceback__):
        if _is_authors(code, module):
            found = f"{PurePath(code.co_filename).name}:{line}"
    return found


def trace_in_code(error: BaseException) -> TracebackType | None:
    """Return the traceback from the outermost line of an author's code on; None if there is none."""
    trace = error.__traceback__
    for code, _, module in _frames(trace):
        if _is_authors(code, module):
            return trace
        trace = None if trace is None else trace.tb_next
    return None


def _frames(trace: TracebackType | None) -> Iterator[tuple[CodeType, int, str]]:
    for _ in range(FRAMES_MAX):
        if trace is None:
            return
        frame = trace.tb_frame
        yield frame.f_code, trace.tb_lineno, str(frame.f_globals.get("__name__", ""))
        trace = trace.tb_next


def _is_authors(code: CodeType, module: str) -> bool:
    if module.partition(".")[0] in {"perdure", *sys.stdlib_module_names}:
        return False
    return not code.co_filename.startswith(("<", *_FOREIGN))
