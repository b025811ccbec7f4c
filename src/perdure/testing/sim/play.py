"""Plays one script: workers, callers, people and followers, until all has ended or time is up."""

import asyncio
import gc
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from perdure.testing.sim.callers import Callers
from perdure.testing.sim.checks import Finding, check, unfinished
from perdure.testing.sim.crew import Crew
from perdure.testing.sim.loop import START_S, Livelock, VirtualLoop, ordered_scopes
from perdure.testing.sim.people import Answering, CallingBack
from perdure.testing.sim.planted import NOTHING, Planted
from perdure.testing.sim.script import (
    FAULTS_END_S,
    Adopt,
    Again,
    Cancel,
    Crash,
    Drain,
    Fault,
    Forget,
    Item,
    Jump,
    Keep,
    Pause,
    People,
    Provider,
    Release,
    Script,
    Submit,
    Subscribe,
    Weather,
)
from perdure.testing.sim.stage import Stage, chance_of
from perdure.testing.sim.stores import StoreKind, backend_of

SETTLE_S = 600.0
"""How much virtual time everything has to end in, once the faults are over."""

FOLLOWERS_S = 60.0
"""How much more followers have to see the end."""

LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a play showed."""

    script: Script
    digest: str
    findings: tuple[Finding, ...]
    coverage: Counter[str]
    runs: int
    events: int
    virtual_s: float
    callbacks: int
    trace: tuple[str, ...]

    @property
    def is_green(self) -> bool:
        """Tell whether nothing was found."""
        return not self.findings


def simulate(script: Script, planted: Planted = NOTHING, *, store: StoreKind = "memory") -> Outcome:
    """Play a script to its end and check all that it left."""
    with _undisturbed(), ordered_scopes(), planted.patched():
        return _played(script, planted, store)  # all that it made can be thrown away by now


def _played(script: Script, planted: Planted, store: StoreKind) -> Outcome:
    loop = VirtualLoop(chance_of(script, "order"))
    play = _Play(script, loop, planted)
    stage = play.stage
    with backend_of(store, stage.db_clock.now, stage.soon) as backend:
        stage.open(backend, play.crew.stop, play.calling_back.take)
        try:
            loop.run_until_complete(play.run())
        except Livelock as error:
            stage.facts.found("progress", str(error))
        finally:
            outcome = play.outcome()
            loop.throw_away()
    return outcome


@contextmanager
def _undisturbed() -> Generator[None]:
    """Let neither the collector nor logs nor what is thrown away have a part in it."""
    was_on, hook, level = gc.isenabled(), sys.unraisablehook, logging.root.manager.disable
    gc.disable()
    gc.freeze()  # the collection at the end looks at what the play has made only
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # tasks of dead processes end when they are thrown away
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
        gc.unfreeze()
        sys.unraisablehook = hook
        logging.disable(level)
        if was_on:
            gc.enable()


class _Play:
    def __init__(self, script: Script, loop: VirtualLoop, planted: Planted) -> None:
        self.loop = loop
        self.stage = Stage(script, loop, planted)
        self.crew = Crew(self.stage)
        self.callers = Callers(self.stage)
        self.answering = Answering(self.stage)
        self.calling_back = CallingBack(self.stage)
        self._ended_at = 0.0

    async def run(self) -> None:
        """Do what the script says, let it heal, wait for the end, and check."""
        stage = self.stage
        async with stage.backend.database:
            stage.outside.deaf = self.answering.people.deaf
            self.crew.start()
            stage.begin(self.answering.run(), stage.api)
            for item in stage.script.items:
                await self._until(item.at)
                self._do(item)
            await self._until(FAULTS_END_S)
            self._heal()
            await self._settle()
            self.crew.check()
            stage.over = True
            self._ended_at = self.loop.time()
            await self._followers_end()
            await check(stage.facts, stage.backend.database)

    def outcome(self) -> Outcome:
        """Return what the play showed."""
        stage = self.stage
        coverage = stage.network.coverage
        coverage.update(stage.facts.coverage)
        return Outcome(
            script=stage.script,
            digest=stage.trace.digest,
            findings=tuple(stage.facts.findings),
            coverage=coverage,
            runs=stage.facts.runs,
            events=stage.facts.events,
            virtual_s=(self._ended_at or self.loop.time()) - START_S,
            callbacks=self.loop.callbacks,
            trace=tuple(stage.trace.lines),
        )

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.stage.now_s))

    def _do(self, item: Item) -> None:
        match item:
            case Submit():
                for _ in range(2 if item.twice else 1):
                    self._begin(self.callers.submit(item))
            case Cancel() | Again() | Adopt() | Subscribe() | Forget():
                self._ask(item)
            case Jump():
                self._jump(item)
            case Crash() | Pause() | Drain() | Release():
                self._disturb(item)
            case Fault() | Weather() | People() | Provider() | Keep():
                pass

    def _ask(self, item: Cancel | Again | Adopt | Subscribe | Forget) -> None:
        match item:
            case Cancel():
                self._begin(self.callers.cancel(item))
            case Again():
                self._begin(self.callers.again(item))
            case Adopt():
                self._begin(self.callers.adopt(item))
            case Subscribe():
                self._begin(self.callers.subscribe(item))
            case Forget():
                self._begin(self.callers.forget(item))

    def _disturb(self, item: Crash | Pause | Drain | Release) -> None:
        match item:
            case Crash():
                self.crew.stop_at(item.worker, None, item.back_s)
            case Pause():
                self.crew.stop_at(item.worker, item.for_s, 0.0)
            case Drain():
                self.crew.drain(item.worker)
            case Release():
                self.stage.facts.releases = True
                self.crew.release(item)

    def _jump(self, item: Jump) -> None:
        stage = self.stage
        clock = stage.db_clock if item.worker is None else stage.clocks[item.worker]
        clock.error_s += item.by_s
        stage.jumps += item.worker is None
        stage.facts.set_back |= item.worker is None and item.by_s < 0
        whose = "the database's" if item.worker is None else "a process's"
        stage.cover(f"clock set: {whose}, by {item.by_s:g} s")
        stage.trace.add(f"{item}")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self.stage.begin(work, self.stage.api)

    def _heal(self) -> None:
        self.stage.trace.add("the faults are over")
        self.stage.outside.deaf = 0.0
        self.crew.heal()

    async def _settle(self) -> None:
        give_up = self.loop.time() + SETTLE_S
        while left := await unfinished(self.stage.backend.database):
            if self.loop.time() > give_up:
                for text in left:
                    self.stage.facts.found("progress", text)
                return
            await asyncio.sleep(LOOK_S)

    async def _followers_end(self) -> None:
        """Let followers come to the end, as far as a slow answer does not keep them."""
        facts = self.stage.facts
        give_up = self.loop.time() + FOLLOWERS_S
        while (  # noqa: ASYNC110  # virtual time costs nothing
            len(facts.followed) < len(facts.seen) and self.loop.time() < give_up
        ):
            await asyncio.sleep(LOOK_S)
