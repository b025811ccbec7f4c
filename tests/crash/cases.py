"""Every case of the acceptance scene, made from one list of hooks (fault catalogue §3.1).

A hook is a commit boundary at one place of the scene. Each is met before, after, and with its
acknowledgement lost, on each store.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from perdure.testing.faults import Boundary, When
from perdure.testing.scene import Act

StoreName = Literal["sqlite", "postgres"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A place in the scene where a fault can happen.

    `by`: the process that meets it. `prelude`: an earlier worker is killed at that place first.
    `losses`: how many attempts are lost at least when it happens before, after, and with the
    acknowledgement lost.
    """

    name: str
    boundary: Boundary
    losses: tuple[int, int, int]
    nth: int = 1
    tool: str | None = None
    by: Literal["worker", "submitter", "answerer", "canceller"] = "worker"
    prelude: "Hook | None" = None
    act: Act = "pay"


_IN_RESULT = Hook(name="result", boundary=Boundary.RESULT, losses=(1, 1, 0))
_IN_PAY = Hook(name="effect-pay", boundary=Boundary.EFFECT, tool="pay", losses=(1, 1, 0))

HOOKS: tuple[Hook, ...] = (
    Hook(name="create", boundary=Boundary.CREATE, by="submitter", losses=(0, 0, 0)),
    Hook(name="claim", boundary=Boundary.CLAIM, losses=(0, 1, 0)),
    Hook(name="heartbeat", boundary=Boundary.HEARTBEAT, losses=(1, 1, 0)),
    Hook(name="start", boundary=Boundary.START, losses=(1, 1, 0)),
    Hook(name="decision", boundary=Boundary.DECISION, losses=(1, 1, 0)),
    Hook(name="decision-last", boundary=Boundary.DECISION, nth=5, losses=(1, 1, 0)),
    _IN_PAY,
    Hook(
        name="effect-idempotent",
        boundary=Boundary.EFFECT,
        tool="pay_idempotent",
        losses=(1, 1, 0),
    ),
    Hook(name="effect-approved", boundary=Boundary.EFFECT, tool="publish", losses=(1, 1, 0)),
    Hook(
        name="effect-lookup",
        boundary=Boundary.EFFECT,
        tool="pay_with_lookup",
        losses=(1, 1, 0),
    ),
    _IN_RESULT,
    Hook(name="result-second", boundary=Boundary.RESULT, nth=3, losses=(1, 1, 0)),
    Hook(name="artifact", boundary=Boundary.ARTIFACT, losses=(1, 1, 0)),
    Hook(name="interrupt", boundary=Boundary.INTERRUPT, losses=(1, 0, 0)),
    Hook(
        name="interrupt-outcome",
        boundary=Boundary.INTERRUPT,
        prelude=_IN_PAY,
        losses=(2, 1, 1),
    ),
    Hook(name="answer", boundary=Boundary.ANSWER, by="answerer", losses=(0, 0, 0)),
    Hook(name="cancel", boundary=Boundary.CANCEL, by="canceller", act="hold", losses=(0, 0, 0)),
    Hook(name="cancel-end", boundary=Boundary.END, act="hold", losses=(1, 0, 0)),
    Hook(name="end", boundary=Boundary.END, losses=(1, 0, 0)),
    Hook(name="code-decision", boundary=Boundary.DECISION, act="code", losses=(1, 1, 0)),
    Hook(
        name="code-decision-later", boundary=Boundary.DECISION, nth=2, act="code", losses=(1, 1, 0)
    ),
    Hook(name="code-effect", boundary=Boundary.EFFECT, tool="pay", act="code", losses=(1, 1, 0)),
    Hook(
        name="code-effect-lookup",
        boundary=Boundary.EFFECT,
        tool="pay_with_lookup",
        act="code",
        losses=(1, 1, 0),
    ),
    Hook(name="code-result", boundary=Boundary.RESULT, act="code", losses=(1, 1, 0)),
    Hook(name="code-result-second", boundary=Boundary.RESULT, nth=3, act="code", losses=(1, 1, 0)),
    Hook(name="code-interrupt", boundary=Boundary.INTERRUPT, act="code", losses=(1, 0, 0)),
    Hook(name="code-end", boundary=Boundary.END, act="code", losses=(1, 0, 0)),
    Hook(name="reclaim", boundary=Boundary.RECLAIM, prelude=_IN_RESULT, losses=(1, 1, 1)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hook, met in one way, on one store."""

    hook: Hook
    when: When
    store: StoreName

    def __str__(self) -> str:
        return f"{self.store}-{self.hook.boundary}-{self.hook.name}-{self.when}"

    @property
    def losses(self) -> int:
        """Return how many attempts are lost at least."""
        return self.hook.losses[list(When).index(self.when)]


ALL: tuple[Case, ...] = tuple(
    Case(hook=hook, when=when, store=store)
    for hook, when, store in itertools.product(HOOKS, When, ("sqlite", "postgres"))
)


def _sample() -> tuple[Case, ...]:
    """Return one case for each kind of boundary on SQLite, the ways in turn, three elsewhere."""
    firsts = {hook.boundary: hook for hook in reversed(HOOKS)}
    ways = itertools.cycle(When)
    cases = [Case(hook=hook, when=next(ways), store="sqlite") for hook in firsts.values()]
    elsewhere = (Boundary.EFFECT, Boundary.RESULT, Boundary.RECLAIM)
    cases += [
        Case(hook=firsts[boundary], when=when, store="postgres")
        for boundary, when in zip(elsewhere, When, strict=True)
    ]
    named = {hook.name: hook for hook in HOOKS}
    cases += [
        Case(hook=named["code-decision-later"], when=When.AFTER, store="sqlite"),
        Case(hook=named["code-effect"], when=When.AFTER, store="sqlite"),
        Case(hook=named["code-result"], when=When.BEFORE, store="postgres"),
    ]
    return tuple(cases)


SAMPLE = _sample()
