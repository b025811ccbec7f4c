"""The workers of a play: they crash, stand still, are drained, and get other releases."""

import asyncio

from perdure.control.policy import DefaultPolicy
from perdure.engine.worker import Worker
from perdure.protocol.errors import Unavailable
from perdure.protocol.states import OnExpiry
from perdure.testing.embedded import new_worker
from perdure.testing.faults import Boundary
from perdure.testing.sim.actors import ReleaseKind, catalog, inline_tools
from perdure.testing.sim.lasting import keeping_catalog
from perdure.testing.sim.loop import Process
from perdure.testing.sim.outside import Workplace, workplace
from perdure.testing.sim.script import WORKERS, Release
from perdure.testing.sim.stage import Stage, inner

STARTS_AGAIN_S = 1.0
DRAINED_S = 90.0
"""So long a worker may take to hand back what it holds and end, also beside faults."""


class Crew:
    """The workers, by their places. A place that is free is taken by the next one."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._release: ReleaseKind = "first"
        self._workers: list[Process] = []
        self._engines: dict[Process, Worker] = {}
        self._draining: dict[Process, float] = {}
        self._started = 0

    def start(self) -> None:
        """Start a worker in each place."""
        for number in range(WORKERS):
            self._workers.append(self._start(number))

    def _start(self, number: int) -> Process:
        self._started += 1
        process = Process(f"worker-{number}.{self._started}")
        self.stage.begin(self._work(process, number), process)
        return process

    async def _work(self, process: Process, number: int) -> None:
        stage = self.stage
        keeps = stage.script.profile == "fields"
        agents = keeping_catalog(self._release) if keeps else catalog(self._release)
        workplace.set(
            Workplace(
                worker=process.name,
                outside=stage.outside,
                meet=lambda kind: stage.network.meet(process, Boundary.EFFECT, kind),
                disturbances=lambda: process.stops + stage.jumps,
            )
        )
        core = stage.core(process, stage.clocks[number])
        while process not in self._draining:
            async with inline_tools(agents) as tools:
                worker = new_worker(core, agents, tools, DefaultPolicy(on_expiry=OnExpiry.DENY))
                worker.worker_id = process.name
                self._engines[process] = worker
                try:
                    await worker.run()
                except Exception as error:  # a supervisor starts it again
                    if not isinstance(inner(error), Unavailable):
                        raise
                    await asyncio.sleep(STARTS_AGAIN_S)
                else:
                    break
        if self._draining.pop(process, None) is None:
            stage.facts.found("error", f"{process} ended by itself")
        else:
            stage.trace.add(f"{process} has ended in order")
            stage.cover("worker drained")
        stage.at(0.0, self._replace, number, process)

    # ---------------------------------------------------------------- what happens to them

    def stop_at(self, number: int, for_s: float | None, back_s: float) -> None:
        """Stop the worker of a place, as `stop` does."""
        self.stop(self._workers[number], for_s, back_s)

    def stop(self, process: Process, for_s: float | None, back_s: float) -> None:
        """Stop a worker for a while; for ever (None) means that another comes after `back_s`."""
        if process.stopped or process.dead or process not in self._workers:
            return
        stage, number = self.stage, self._workers.index(process)
        stage.loop.stop_process(process)
        if for_s is None:
            process.dead = True
            stage.cover("worker crashed")
            stage.trace.add(f"{process} CRASHES, another comes after {back_s:g} s")
            self._draining.pop(process, None)
            stage.at(back_s, self._replace, number, process)
        else:
            stage.cover("worker paused")
            stage.trace.add(f"{process} STOPS for {for_s:g} s")
            stage.at(for_s, self._resume, process)

    def drain(self, number: int) -> None:
        """Ask the worker of a place to end in order."""
        process = self._workers[number]
        if process.dead or process in self._draining:
            return
        self.stage.trace.add(f"{process} is to end in order")
        self._draining[process] = self.stage.now_s
        engine = self._engines.get(process)
        if engine is not None:  # a worker that stands still hears of it once it goes on
            self.stage.loop.call_soon(engine.drain, context=process.context)

    def release(self, item: Release) -> None:
        """Bring a release: workers that start have it, and each is asked to end in its turn."""
        self.stage.trace.add(f"{item}")
        self.stage.cover(f"release {item.kind}")
        self._release = item.kind
        for number in range(WORKERS):
            self.stage.at(number * item.each_s, self._drain_old, number, self._workers[number])

    def _drain_old(self, number: int, old: Process) -> None:
        if self._workers[number] is old:
            self.drain(number)

    def _replace(self, number: int, gone: Process) -> None:
        if self._workers[number] is gone:
            self._workers[number] = self._start(number)

    def _resume(self, process: Process) -> None:
        if process.stopped and not process.dead:
            self.stage.trace.add(f"{process} goes on")
            self.stage.loop.resume_process(process)

    def heal(self) -> None:
        """Let every place have a worker that works."""
        for number, process in enumerate(self._workers):
            if process.dead:
                self._replace(number, process)
            else:
                self._resume(process)

    def check(self) -> None:
        """Find those who were to end in order and did not."""
        for process, asked_s in self._draining.items():
            if self.stage.now_s - asked_s > DRAINED_S:
                self.stage.facts.found("progress", f"{process} was to end and has not")
