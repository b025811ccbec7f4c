"""What the parts of an attempt share: the held run, and what surrounds it in its worker."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from perdure.engine.committer import Committer
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.judging import Judge
from perdure.engine.lease import Lease
from perdure.engine.ports import PlannerSession, ToolOutcome, ToolRunner
from perdure.engine.snapshot import OpenCall
from perdure.engine.turns import Turns
from perdure.engine.view import RunView
from perdure.protocol.plain import value


@value
class Finished:
    """An execution that came to an end and is not recorded yet. `lost`: with its worker."""

    call: OpenCall
    execution: int
    outcome: ToolOutcome
    source: Literal["tool", "lookup", "lost"] = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all attempts of a worker share. `on_late` keeps a result that came too late,
    `on_cleared` is called when a suspected run has committed a step.
    """

    core: Core
    committer: Committer
    tools: ToolRunner
    worker_id: str
    on_late: Callable[[Finished, RunView, Lease], None]
    on_cleared: Callable[[], None]
    turns: Turns = field(default_factory=Turns)


class HeldRun(Protocol):
    """A run in the hands of an attempt."""

    around: Surroundings
    lease: Lease
    view: RunView
    judge: Judge
    session: PlannerSession | None
    released: bool

    def draft(self) -> Draft:
        """Return an empty commit of this holder."""
        ...

    def check_lease(self) -> None:
        """Raise LeaseGone when the lease is no longer trusted."""
        ...

    async def commit(self, draft: Draft) -> bool:
        """Write a draft; False when it was thrown away and the view loaded again."""
        ...

    async def look_for_answers(self) -> None:
        """Fold what others wrote in the meantime."""
        ...
