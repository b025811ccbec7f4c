"""Waiting in tests for what rings no bell: a flag of a library, a file of another process."""

from collections.abc import Callable

import anyio


async def eventually(holds: Callable[[], object], seconds: float = 30) -> None:
    """Return once a condition of this process holds.

    For runs there are bells: `Embedded.wait_until` and `World.until` hear of each commit.
    """
    with anyio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110  # what is looked at has no event
            await anyio.sleep(0.01)
