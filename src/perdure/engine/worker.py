"""A worker: claims runs, holds their leases, carries them out, and hands them back.

Concurrency: one task group owns the committer, the claim loop, the heartbeat's answers, the
maintenance and one task for each held run. The heartbeat renews all leases at once, on a thread
of its own where the store allows it, and only while the engine's loop shows a pulse: a wedged
loop must not keep its leases (decision 16). An attempt's error stops in `_run_one`.

Shutdown: stop claiming, keep heartbeating, let every attempt commit at its next boundary and
hand back; after the grace period what is left is released as it stands.
"""

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
from pydantic import JsonValue

from perdure.engine.attempt import Attempt
from perdure.engine.committer import Committer
from perdure.engine.compensation import Compensator
from perdure.engine.continuing import comes_too_early, pause_for_origin_s
from perdure.engine.core import Core
from perdure.engine.failing import first_of, log_failed
from perdure.engine.heartbeat import Heartbeat
from perdure.engine.held import Surroundings
from perdure.engine.incompatible import VersionGone, end_incompatible
from perdure.engine.judging import Judge
from perdure.engine.late import LateResults
from perdure.engine.lease import Lease, LeaseGone, Stop
from perdure.engine.load import Damaged, load_claimed
from perdure.engine.maintenance import Maintenance
from perdure.engine.notices import Notices
from perdure.engine.ports import AgentCatalog, Notifier, Policy, ToolRunner
from perdure.engine.retention import Retention
from perdure.engine.returning import return_by_policy
from perdure.protocol.agents import AgentCard
from perdure.protocol.base import RUNTIME_VERSION
from perdure.protocol.codec import digest
from perdure.protocol.errors import PerdureError, Unavailable
from perdure.protocol.ids import WORKER
from perdure.protocol.schema import Incompatible
from perdure.signals.ports import CANCEL_TOPIC, QUEUE_TOPIC, Wakeup
from perdure.store.requests import (
    AgentRegistration,
    Claimed,
    ClaimWant,
    LeaseKey,
    ToolRegistration,
)

log = logging.getLogger(__name__)

RELEASE_PAUSES_S = (0.0, 0.02, 0.1, 0.4)
"""How long to wait before each try to give leases back whose rows may be busy."""
UNKNOWN_MAX = 1000
"""So many leases are looked at when a claim's answer was lost."""


@dataclass(slots=True)
class Worker:
    """Carries out runs of the agents in its catalog. `run` returns when it was drained."""

    core: Core
    catalog: AgentCatalog
    tools: ToolRunner
    policy: Policy
    heartbeat: Heartbeat
    worker_id: str = ""
    notifier: Notifier | None = None
    beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """What else this process does until the worker is drained."""
    _leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    _late: LateResults = field(init=False)
    _drain: anyio.Event = field(default_factory=anyio.Event)
    _freed: anyio.Event = field(default_factory=anyio.Event)
    _claim_sent: float = 0.0
    _doubtful_until: float = float("-inf")
    _left: dict[LeaseKey, float] = field(default_factory=dict[LeaseKey, float])
    """Leases that attempts left as they were, to run out; until when."""
    _idle: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _claims_over: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.worker_id = self.worker_id or self.core.ids.new(WORKER)
        self._late = LateResults(self.core)

    def drain(self) -> None:
        """Ask the worker to stop: no new claims, held runs handed back at their next boundary."""
        self._drain.set()
        self._freed.set()
        self._idle.cancel()

    @property
    def held_runs(self) -> list[str]:
        """The runs this worker holds at the moment."""
        return list(self._leases)

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Register what is served, then work until drained."""
        await self._register()
        committer = Committer(self.core)
        around = Surroundings(
            core=self.core,
            committer=committer,
            tools=self.tools,
            worker_id=self.worker_id,
            on_late=self._late.keep,
            on_cleared=self._look_again,
        )
        compensator = Compensator(self.core, self.tools, self.worker_id)
        async with anyio.create_task_group() as services:
            services.start_soon(committer.run)
            services.start_soon(self.heartbeat.run, self)
            services.start_soon(self._heed_cancels)
            services.start_soon(self._late.run)
            services.start_soon(compensator.run)
            notices = Notices(self.core, self.notifier)
            services.start_soon(notices.run)
            sweeps = Maintenance(
                core=self.core, tools=self.tools, compensator=compensator, notices=notices
            )
            services.start_soon(sweeps.run)
            services.start_soon(Retention(core=self.core).run)
            for service in self.beside:
                services.start_soon(service)
            async with anyio.create_task_group() as attempts:
                attempts.start_soon(self._claim_loop, around, attempts)
                task_status.started()
                await self._drain.wait()
                async with anyio.create_task_group() as drained:
                    drained.start_soon(compensator.drain_within, self.core.settings.drain_grace_s)
                    await self._drain_attempts()
                attempts.cancel_scope.cancel()
            await self._late.flush()
            services.cancel_scope.cancel()

    async def _register(self) -> None:
        agents = [
            AgentRegistration(
                agent_id=hosted.card.agent_id,
                version=hosted.card.version,
                card=_card_json(hosted.card),
                digest=digest(_card_json(hosted.card)),
            )
            for hosted in self.catalog.served()
        ]
        tools = [
            ToolRegistration(
                name=spec.name,
                version=spec.version,
                spec=spec.model_dump(mode="json"),
                digest=spec.definition_digest,
            )
            for spec in self.catalog.tool_specs()
        ]
        await self.core.store.register(agents, tools)

    async def _claim_loop(self, around: Surroundings, attempts: anyio.abc.TaskGroup) -> None:
        async with self.core.signals.subscribe(QUEUE_TOPIC) as wakeup:
            while not self._drain.is_set():
                await self._give_back_unknown()
                free = self.core.settings.runs_max - len(self._leases)
                if free <= 0:
                    self._freed = anyio.Event()
                    with anyio.move_on_after(self._look_again_in_s):
                        await self._freed.wait()
                    continue
                claimed = await self._claim(free)
                for item in claimed:
                    lease = self._hold(item)
                    attempts.start_soon(self._run_one, around, item, lease)
                if len(claimed) < free:
                    await self._wait_for_work(wakeup)
        self._claims_over.set()

    async def _claim(self, limit: int) -> list[Claimed]:
        self._claim_sent = self.core.clock.monotonic()
        want = ClaimWant(
            worker_id=self.worker_id,
            limit=limit,
            lease_ttl_s=self.core.settings.lease_ttl_s,
            serves=(
                *((hosted.card.agent_id, hosted.card.version) for hosted in self.catalog.served()),
                *self.catalog.replaced(),
            ),
            queues=self.core.settings.queues,
            runtime_version=RUNTIME_VERSION,
            suspects_max=0 if self._holds_suspect else 1,
        )
        try:
            claimed = await self.core.store.claim_runs(want)
            if claimed and self._claimed_too_late():
                await self._hand_back(claimed)
                return []
        except PerdureError as error:
            log.warning("claim failed: %s", error)
            self._doubt_claims()
            await anyio.sleep(self.core.settings.poll_interval_s)
            return []
        self.core.metrics.engine.claims.inc(len(claimed))
        return claimed

    def _doubt_claims(self) -> None:
        self._doubtful_until = self.core.clock.monotonic() + self.core.settings.lease_ttl_s

    @property
    def _look_again_in_s(self) -> float:
        """How long to wait for a free place: not for ever while a claim's answer may be lost."""
        if self.core.clock.monotonic() < self._doubtful_until:
            return self.core.settings.heartbeat_s
        return float("inf")

    async def _give_back_unknown(self) -> None:
        """Hand back what a claim took whose answer was lost: nobody here knows of it.

        Such a lease would run out, which counts against a run that was never tried. Looked for
        until it would have, as the claim may become durable after its answer was given up. Leases
        that an attempt has left as they were do run out: that bounds the tries.
        """
        now_s = self.core.clock.monotonic()
        self._left = {key: until for key, until in self._left.items() if now_s < until}
        if now_s >= self._doubtful_until:
            return
        try:
            held = await self.core.reader.leases_of(self.worker_id, UNKNOWN_MAX)
            known = {*self.lease_keys(), *self._left}
            unknown = [key for key in held if key not in known]
            if unknown:
                log.warning("%d runs of a claim without answer are handed back", len(unknown))
                await self._release(unknown)
        except PerdureError as error:
            log.warning("what a failed claim took is not known yet: %s", error)

    @property
    def _holds_suspect(self) -> bool:
        """Tell whether a held run may have killed its last worker: no second one beside it."""
        return any(lease.suspected for lease in self._leases.values())

    def _look_again(self) -> None:
        """End the wait for work: a run that could not be taken before may be taken now."""
        self._idle.cancel()

    @property
    def _trusted_until(self) -> float:
        """Until when leases of the last claim are trusted, unless they are renewed."""
        settings = self.core.settings
        return self._claim_sent + settings.lease_ttl_s - settings.lease_margin_s

    def _claimed_too_late(self) -> bool:
        """Tell whether the answer took so long that no renewal may come in time."""
        left_s = self._trusted_until - self.core.clock.monotonic()
        return left_s < self.core.settings.heartbeat_s

    async def _hand_back(self, claimed: list[Claimed]) -> None:
        """Release what cannot be trusted; a lease that ran out would count against the runs."""
        log.warning("%d runs were claimed too late and are handed back", len(claimed))
        keys = [LeaseKey(run_id=item.row.facts.run_id, token=item.token) for item in claimed]
        if not await self._release(keys):
            self._doubt_claims()

    def _hold(self, claimed: Claimed) -> Lease:
        lease = Lease(
            claimed.row.facts.run_id,
            claimed.token,
            valid_until=self._trusted_until,
            epoch=claimed.row.hot.cancel_epoch,
        )
        lease.suspected = claimed.row.hot.faults > 0
        older = self._leases.get(lease.run_id)
        if older is not None:  # lost and claimed again before its attempt has wound up
            older.stop(Stop.LEASE_LOST)
        self._leases[lease.run_id] = lease
        self.core.metrics.engine.runs_held.set(len(self._leases))
        return lease

    async def _wait_for_work(self, wakeup: Wakeup) -> None:
        jitter = 0.75 + self.core.chance.random() / 2
        with anyio.move_on_after(self.core.settings.poll_interval_s * jitter) as self._idle:
            if not self._drain.is_set():
                await wakeup.wait()

    async def _run_one(self, around: Surroundings, claimed: Claimed, lease: Lease) -> None:
        """Carry one run as far as it goes. The only place where an attempt's error stops."""
        attempt: Attempt | None = None
        try:
            attempt = await self._begin(around, claimed, lease)
            if attempt is not None:
                await attempt.run()
        except* LeaseGone:
            self.core.metrics.engine.lease_losses.inc()
            log.info("lease lost", extra={"run_id": lease.run_id})
        except* Exception as group:  # noqa: BLE001  # the one boundary of an attempt
            await self._wind_up(claimed, attempt, lease, first_of(group))
        finally:
            if self._leases.get(lease.run_id) is lease:
                del self._leases[lease.run_id]
            if attempt is None or not attempt.released:
                key = LeaseKey(run_id=lease.run_id, token=lease.token)
                self._left[key] = lease.valid_until + self.core.settings.lease_ttl_s
            self.core.metrics.engine.runs_held.set(len(self._leases))
            self._freed.set()
            if lease.suspected:
                self._look_again()
            if attempt is not None:
                for item in attempt.effects.end():
                    self._late.keep(item, attempt.view, lease)

    async def _begin(self, around: Surroundings, claimed: Claimed, lease: Lease) -> Attempt | None:
        facts = claimed.row.facts
        pause_s: float | None = None
        if facts.retry_of is not None and await comes_too_early(self.core, claimed.row):
            pause_s = pause_for_origin_s(claimed.row)
        agent_id, version = facts.agent_now
        agent = self.catalog.find(agent_id, version)
        if agent is None:
            agent = newer = self.catalog.replaced()[agent_id, version]
            if pause_s is None:  # else it is given back as it is, whoever does that
                reason = (
                    f"version {version} of {agent_id} is gone: {newer.card.version} replaces it"
                )
                raise VersionGone(reason, newer.card if newer.continues else None)
        view = await load_claimed(self.core, claimed, self.worker_id)
        judge = Judge(
            agent=agent,
            tools=self.tools,
            policy=self.policy,
            settings=self.core.settings,
            notifies=self.notifier is not None,
        )
        hot = claimed.row.hot  # as of the claim: by the store's time, like its other times
        worked = (hot.updated_at - hot.started_at).total_seconds() if hot.started_at else 0.0
        return Attempt(
            around=around,
            lease=lease,
            view=view,
            judge=judge,
            claimed_at=hot.updated_at,
            started_at=self.core.clock.monotonic(),
            deadline_in_s=claimed.deadline_in_s,
            worked_before_s=max(0.0, worked - view.waiting_ms / 1000),
            input_position=claimed.input_position,
            pause_s=pause_s,
        )

    async def _wind_up(
        self, claimed: Claimed, attempt: Attempt | None, lease: Lease, error: Exception
    ) -> None:
        """Record how an attempt failed. When even that fails, its lease runs out by itself."""
        settings = self.core.settings
        try:
            with anyio.CancelScope(shield=True):
                fails = settings.on_incompatible == "fail" or isinstance(error, VersionGone)
                if isinstance(error, Incompatible) and fails:
                    await end_incompatible(self.core, lease, error)
                elif isinstance(error, (Damaged, Incompatible)):
                    await self._put_aside(claimed, attempt, lease, error)
                elif attempt is not None:
                    log_failed(lease.run_id, error)
                    await attempt.fail_attempt(error)
                else:
                    await self._not_begun(lease, error)
        except* LeaseGone:
            log.info("lease lost while failing", extra={"run_id": lease.run_id})
        except* Exception as group:  # noqa: BLE001  # one run must not take the worker down
            log.warning("run %s: its failure is not recorded: %s", lease.run_id, first_of(group))

    async def _put_aside(
        self, claimed: Claimed, attempt: Attempt | None, lease: Lease, error: Exception
    ) -> None:
        log.error("run %s is put aside for repair: %s", lease.run_id, error)
        step = claimed.row.hot.step_index
        if attempt is not None:
            step = attempt.view.snapshot.step_index
        why = str(error)[:1000]
        aside = await self.core.store.quarantine(lease.run_id, lease.token, why, step)
        if aside and isinstance(error, Damaged):
            await return_by_policy(self.core, lease.run_id, error)

    async def _not_begun(self, lease: Lease, error: Exception) -> None:
        """Give a run back that could not be loaded because the store was away.

        For any other error its lease runs out: that counts as a fault, and bounds the tries.
        """
        log.warning("run %s could not be loaded", lease.run_id, exc_info=error)
        if isinstance(error, Unavailable):
            await self._release([LeaseKey(run_id=lease.run_id, token=lease.token)])

    # -- leases

    def lease_keys(self) -> list[LeaseKey]:
        """Return the leases to be renewed. Called from the heartbeat's thread."""
        return [
            LeaseKey(run_id=lease.run_id, token=lease.token)
            for lease in list(self._leases.values())
        ]

    def renewed(self, key: LeaseKey, *, held: bool, epoch: int, valid_until: float) -> None:
        """Take the answer for one lease; called on the engine's loop."""
        lease = self._leases.get(key.run_id)
        if lease is None or lease.token != key.token:
            return
        if not held:
            lease.stop(Stop.LEASE_LOST)
            return
        lease.valid_until = max(lease.valid_until, valid_until)
        if epoch > lease.epoch:
            lease.epoch = epoch
            lease.stop(Stop.CANCEL)

    def stop_expired(self) -> None:
        """Stop every attempt whose lease is no longer trusted; called on the engine's loop."""
        now = self.core.clock.monotonic()
        for lease in list(self._leases.values()):
            if not lease.is_valid(now):
                lease.stop(Stop.LEASE_LOST)

    async def _heed_cancels(self) -> None:
        async with self.core.signals.subscribe(CANCEL_TOPIC) as wakeup:
            while True:
                await wakeup.wait()
                self.heartbeat.beat_now()

    # -- shutdown

    async def _drain_attempts(self) -> None:
        """Hand back what is held; a claim that is under way is waited for, or nobody knew of it."""
        grace_s = self.core.settings.drain_grace_s
        if self._leases:
            log.info("draining: %d runs are held, for %g s at most", len(self._leases), grace_s)
        with anyio.move_on_after(grace_s):
            for lease in self._leases.values():
                lease.draining = True
            await self._claims_over.wait()
            await self._give_back_unknown()
            for lease in self._leases.values():
                lease.draining = True
            while self._leases:
                self._freed = anyio.Event()
                await self._freed.wait()
        keys = self.lease_keys()
        for lease in list(self._leases.values()):
            lease.stop(Stop.DRAIN)
        if keys:
            await self._release(keys)

    async def _release(self, leases: list[LeaseKey]) -> bool:
        """Give leases back, busy rows at a later try: one that runs out counts against its run.

        Tell whether none is held any more.
        """
        left, given = leases, 0
        try:
            for pause_s in RELEASE_PAUSES_S:
                await anyio.sleep(pause_s)
                given += await self.core.store.release_runs(self.worker_id, left)
                if given == len(leases):
                    break
                held = await self.core.reader.leases_of(self.worker_id, UNKNOWN_MAX)
                left = [key for key in left if key in held]
                if not left:
                    break
        except PerdureError as error:
            log.warning("%d leases are left to run out: %s", len(leases) - given, error)
            return False
        log.info("%d of %d runs are handed back", given, len(leases))
        self.core.signals.publish(QUEUE_TOPIC)
        return given == len(leases) or not left


def _card_json(card: AgentCard) -> JsonValue:
    return card.model_dump(mode="json")
