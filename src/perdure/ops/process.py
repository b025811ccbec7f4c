"""What a process does for itself when it begins to serve, and how it stops one of its own."""

import gc
import sys

import anyio
import anyio.abc

YOUNG_OBJECTS_MAX = 20_000
COLLECTIONS_PER_GENERATION = 25
SWITCH_S = 0.0002


def tune_interpreter() -> None:
    """Let the garbage collector look less often, and threads have the interpreter sooner.

    A worker keeps hundreds of thousands of long-lived objects and makes thousands of short-lived
    ones a second, nearly all freed by reference count: with Python's defaults a tenth of the time
    goes into looking at all of them. And the engine's loop and the thread that writes to SQLite
    hand work to each other all the time: each hand-over may wait 5 ms for the other's bytecode.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, COLLECTIONS_PER_GENERATION, COLLECTIONS_PER_GENERATION)
    sys.setswitchinterval(SWITCH_S)


async def stop_child(process: anyio.abc.Process, grace_s: float) -> None:
    """End a child that stops when its standard input is closed; kill it when it does not in time."""
    if process.stdin is not None:
        await process.stdin.aclose()
    with anyio.move_on_after(grace_s):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
