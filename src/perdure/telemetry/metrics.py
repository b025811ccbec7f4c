"""What engine and server count (R-17.3), in a registry of their own, for Prometheus to fetch.

One `Metrics` object serves one process; it is handed down like every other port. Label values
come from closed lists or from registered agents and tools, never from what a caller sends, so the
number of series stays bounded.
"""

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """How runs end and what waits."""

    finished: Counter
    by_state: Gauge
    ready: Gauge
    ready_age_s: Gauge
    queue_ready: Gauge
    queue_ready_age_s: Gauge
    open_interrupts: Gauge
    open_interrupts_age_s: Gauge


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What workers do."""

    claims: Counter
    lease_losses: Counter
    late_writes: Counter
    commits: Counter
    commit_batch: Histogram
    commit_seconds: Histogram
    tool_calls: Counter
    compensations: Counter
    retries: Counter
    slots_lost: Gauge
    runs_held: Gauge
    fragments_dropped: Counter
    verified: Counter
    verify_findings: Counter


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What callers do."""

    requests: Counter
    request_seconds: Histogram
    sse_subscribers: Gauge
    sse_dropped: Counter


def _runs(registry: CollectorRegistry) -> RunMetrics:
    return RunMetrics(
        finished=Counter(
            "perdure_runs_finished",
            "Runs that ended, by state, failure code and agent.",
            ("state", "code", "agent"),
            registry=registry,
        ),
        by_state=Gauge("perdure_runs", "Runs by state.", ("state",), registry=registry),
        ready=Gauge("perdure_ready_runs", "Runs that wait for a worker.", registry=registry),
        ready_age_s=Gauge(
            "perdure_ready_age_seconds",
            "How long the oldest run has waited for a worker.",
            registry=registry,
        ),
        queue_ready=Gauge(
            "perdure_queue_ready_runs",
            "Runs that wait for a worker, by queue; a queue in which none waits is left out.",
            ("queue",),
            registry=registry,
        ),
        queue_ready_age_s=Gauge(
            "perdure_queue_ready_age_seconds",
            "How long the oldest run of a queue has waited for a worker.",
            ("queue",),
            registry=registry,
        ),
        open_interrupts=Gauge(
            "perdure_open_interrupts", "Interrupts that wait for an answer.", registry=registry
        ),
        open_interrupts_age_s=Gauge(
            "perdure_open_interrupts_age_seconds",
            "How long the oldest open interrupt has waited.",
            registry=registry,
        ),
    )


def _engine(registry: CollectorRegistry) -> EngineMetrics:
    return EngineMetrics(
        claims=Counter("perdure_claims", "Runs claimed by this process.", registry=registry),
        lease_losses=Counter(
            "perdure_lease_losses", "Leases lost by this process.", registry=registry
        ),
        late_writes=Counter(
            "perdure_late_writes", "Results recorded after the right was lost.", registry=registry
        ),
        commits=Counter(
            "perdure_commits", "Commits by their answer.", ("result",), registry=registry
        ),
        commit_batch=Histogram(
            "perdure_commit_batch_size",
            "Commits written in one transaction.",
            buckets=_SIZES,
            registry=registry,
        ),
        commit_seconds=Histogram(
            "perdure_commit_seconds",
            "Time from handing in a commit to its answer.",
            buckets=_SECONDS,
            registry=registry,
        ),
        tool_calls=Counter(
            "perdure_tool_calls",
            "Tool calls that ended, by tool and status.",
            ("tool", "status"),
            registry=registry,
        ),
        compensations=Counter(
            "perdure_compensations",
            "Effects of cancelled runs that were to be undone, by what became of it.",
            ("status",),
            registry=registry,
        ),
        retries=Counter("perdure_retries", "Retries by subject.", ("subject",), registry=registry),
        slots_lost=Gauge(
            "perdure_slots_lost", "Slots held by code that does not return.", registry=registry
        ),
        runs_held=Gauge("perdure_runs_held", "Runs this process holds.", registry=registry),
        fragments_dropped=Counter(
            "perdure_live_fragments_dropped",
            "Live fragments of replies that were not sent: slow, gap, long, lease, epoch, ended.",
            ("reason",),
            registry=registry,
        ),
        verified=Counter(
            "perdure_verified_runs", "Runs that the verification sweep checked.", registry=registry
        ),
        verify_findings=Counter(
            "perdure_verify_findings",
            "Broken invariants that the verification sweep found, by check.",
            ("check",),
            registry=registry,
        ),
    )


def _server(registry: CollectorRegistry) -> ServerMetrics:
    return ServerMetrics(
        requests=Counter(
            "perdure_http_requests",
            "HTTP requests by method, route and status.",
            ("method", "route", "status"),
            registry=registry,
        ),
        request_seconds=Histogram(
            "perdure_http_request_seconds",
            "Time to the end of a response that is not a stream.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        ),
        sse_subscribers=Gauge("perdure_sse_subscribers", "Open event streams.", registry=registry),
        sse_dropped=Counter(
            "perdure_sse_dropped",
            "Event streams cut because the client did not read.",
            registry=registry,
        ),
    )


@dataclass(slots=True)
class Metrics:
    """All series of one process; `text()` is what Prometheus reads."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    runs: RunMetrics = field(init=False)
    engine: EngineMetrics = field(init=False)
    server: ServerMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.runs = _runs(self.registry)
        self.engine = _engine(self.registry)
        self.server = _server(self.registry)

    def text(self) -> bytes:
        """Return the exposition text of all series."""
        return generate_latest(self.registry)
