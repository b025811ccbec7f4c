"""The engine's surroundings, handed down instead of imported: ports, clock, ids, settings."""

from dataclasses import dataclass, field
from typing import Literal

from perdure.engine.directory import AgentDirectory
from perdure.engine.live import LiveHub
from perdure.engine.ports import Chance, Clock, Ids
from perdure.signals.ports import Signals
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import RetentionRule
from perdure.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Times and limits of the engine. Seconds unless the name says otherwise."""

    lease_ttl_s: float = 30.0
    heartbeat_s: float = 10.0
    lease_margin_s: float = 3.0
    poll_interval_s: float = 1.0
    maintenance_interval_s: float = 1.0
    runs_max: int = 64
    queues: tuple[str, ...] = ("default",)
    tool_slots_max: int = 128
    commit_batch_max: int = 128
    tool_timeout_s: float = 60.0
    callback_timeout_s: float = 86_400.0
    cancel_grace_s: float = 5.0
    drain_grace_s: float = 20.0
    on_incompatible: Literal["fail", "repair"] = "fail"
    on_damage: Literal["wait", "return"] = "wait"
    retention: tuple[RetentionRule, ...] = ()
    retention_interval_s: float = 3600.0
    blobs_kept_s: float = 86_400.0
    delta_interval_s: float = 0.2
    cancel_deadline_s: float = 60.0
    compensation_deadline_s: float = 900.0
    notice_retry_s: float = 5.0
    principals: frozenset[str] | None = None
    """Everybody who can answer here; None: that is not known."""
    depth_max: int = 5
    children_max: int = 128
    detached_max: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What every part of the engine works with."""

    store: Store
    reader: Reader
    signals: Signals
    clock: Clock
    ids: Ids
    chance: Chance
    directory: AgentDirectory
    settings: EngineSettings = EngineSettings()
    metrics: Metrics = field(default_factory=Metrics)
    live: LiveHub = field(default_factory=LiveHub)
