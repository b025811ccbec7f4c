"""The composition root: settings become a store, signals, agents, tools, a worker, an application.

The only module that chooses adapters, and the only one that knows the system's clock, its source
of ids and its chance.
"""

import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import uuid_utils

from perdure.agents.catalog import Catalog, load_catalog
from perdure.control.notify import FunctionNotifier
from perdure.control.policy import MISSING_OF_SANDBOX_ONLY, DefaultPolicy
from perdure.engine.core import Core, EngineSettings
from perdure.engine.directory import AgentDirectory
from perdure.engine.heartbeat import LoopHeartbeat, ThreadHeartbeat
from perdure.engine.worker import Worker
from perdure.ops.settings import Settings, masked_url
from perdure.ops.verify.sweep import Sweep, SweepTerms
from perdure.protocol.base import PRINCIPAL_LOCAL
from perdure.protocol.errors import Conflict, Invalid, Unavailable
from perdure.protocol.states import RunState
from perdure.service.base import Service
from perdure.signals.local import LocalSignals, PolledSignals
from perdure.signals.off import NoSignals
from perdure.signals.ports import Signals
from perdure.store.ports import Database
from perdure.store.requests import RetentionRule
from perdure.store.sqlite import SqliteDatabase
from perdure.store.sqlite.status import read_schema_state
from perdure.store.status import SchemaState
from perdure.tools.runner import LocalToolRunner

if TYPE_CHECKING:
    from fastapi import FastAPI

    from perdure.server.settings import ServerSettings
    from perdure.server.stopping import Stopping


log = logging.getLogger(__name__)


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.now(UTC)  # noqa: TID251  # the one place that asks the system

    monotonic = staticmethod(time.monotonic)
    """Seconds that never go back."""


class SystemIds:
    """UUIDv7: ordered by time, unguessable."""

    def new(self, prefix: str) -> str:
        """Return a fresh id."""
        return f"{prefix}_{uuid_utils.uuid7().hex}"


class SystemChance:
    """Chance for jitter; nothing secret depends on it."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        return random.random()  # noqa: S311  # jitter needs no secrecy


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """An embedded runtime: the use cases, and the worker that carries runs out."""

    service: Service
    worker: Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """The API over a core, ready for a server. Set `stopping` to end streams and waits."""

    app: "FastAPI"
    settings: "ServerSettings"
    stopping: "Stopping"
    worker: Worker | None = None


# ---------------------------------------------------------------- database and signals


def make_database(settings: Settings) -> Database:
    """Return the database that the URL names, not opened. Raises Unavailable, Invalid."""
    path = settings.db.sqlite_path
    if path is None:
        return _postgres_database(settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"no folder for the database: {error}") from error
    return SqliteDatabase(path)


def _postgres_database(settings: Settings) -> Database:
    try:
        from perdure.store.postgres import PostgresDatabase
    except ModuleNotFoundError as error:
        raise _lacks_postgres() from error
    return PostgresDatabase(
        settings.db.url,
        pgbouncer=settings.db.pgbouncer,
        pool_max=settings.db.pool_max,
        direct_dsn=settings.db.direct_url,
    )


def _lacks_postgres() -> Invalid:
    return Invalid("a postgresql:// database needs the extra: pip install 'perdure[postgres]'")


async def database_status(settings: Settings) -> SchemaState:
    """Return how the database's schema stands to this code, without changing anything."""
    path = settings.db.sqlite_path
    if path is not None:
        return await anyio.to_thread.run_sync(read_schema_state, path)
    try:
        from perdure.store.postgres.status import read_schema_state as read_postgres
    except ModuleNotFoundError as error:
        raise _lacks_postgres() from error
    return await read_postgres(settings.db.direct_url or settings.db.url)


async def require_schema(settings: Settings) -> None:
    """Raise Conflict for a database that lacks migrations, for what must not apply them.

    It changes nothing. Raises Unavailable as well, and SchemaRefused for one that is too new.
    """
    found = await database_status(settings)
    if found.pending:
        raise Conflict(
            f"the database {masked_url(settings.db.url)} has schema version "
            f"{found.database_version}, this release needs {found.code_version}: if it is the "
            "right one, run `perdure db upgrade`",
            details={"database": found.database_version, "code": found.code_version},
        )


def make_signals(settings: Settings, database: Database) -> Signals:
    """Return the signals that the settings ask for and the database allows; raise Invalid."""
    chosen = settings.signals
    if chosen == "auto":
        chosen = "polled" if isinstance(database, SqliteDatabase) else "postgres"
    match chosen:
        case "local":
            return LocalSignals()
        case "off":
            return NoSignals()
        case "polled":
            if not isinstance(database, SqliteDatabase):
                raise Invalid("signals = polled needs a SQLite database")
            return PolledSignals(database.foreign_version)
        case "postgres":
            if isinstance(database, SqliteDatabase):
                raise Invalid("signals = postgres needs a PostgreSQL database")
            from perdure.signals.postgres import PostgresSignals

            return PostgresSignals(settings.db.direct_url or settings.db.url)


# ---------------------------------------------------------------- the engine


def engine_settings(settings: Settings) -> EngineSettings:
    """Return the engine's times and limits."""
    worker = settings.worker
    return EngineSettings(
        lease_ttl_s=worker.lease_ttl_s,
        heartbeat_s=worker.beat_s,
        lease_margin_s=worker.lease_ttl_s / 10,
        poll_interval_s=worker.poll_interval_s,
        maintenance_interval_s=min(1.0, worker.lease_ttl_s / 4),
        runs_max=worker.runs_max,
        queues=worker.queues,
        tool_slots_max=worker.tool_slots_max,
        tool_timeout_s=worker.tool_timeout_s,
        callback_timeout_s=worker.callback_timeout_s,
        drain_grace_s=worker.drain_grace_s,
        on_incompatible=worker.on_incompatible,
        on_damage=worker.on_damage,
        retention=tuple(retention_rules(settings)),
        retention_interval_s=settings.retention.interval_s,
        blobs_kept_s=settings.retention.blobs_s,
        cancel_deadline_s=settings.children.cancel_deadline_s,
        compensation_deadline_s=worker.compensation_deadline_s,
        principals=frozenset({PRINCIPAL_LOCAL}),
        depth_max=settings.children.depth_max,
        children_max=settings.children.open_max,
        detached_max=settings.children.detached_max,
    )


def retention_rules(settings: Settings) -> Iterator[RetentionRule]:
    """Yield what the settings say of keeping history. A tenant named without a time keeps all."""
    named = settings.retention.tenants.items()
    for tenant_id, times in ((None, settings.retention), *named):
        for state, seconds in (
            (RunState.SUCCEEDED, times.succeeded_s),
            (RunState.FAILED, times.failed_s),
        ):
            if seconds is not None or tenant_id is not None:
                yield RetentionRule(state=state, tenant_id=tenant_id, older_than_s=seconds)


@asynccontextmanager
async def open_core(settings: Settings) -> AsyncGenerator[Core]:
    """Open the database, applying pending migrations, and the signals."""
    clock = SystemClock()
    database = make_database(settings)
    signals = make_signals(settings, database)
    async with database, signals:
        yield Core(
            store=database.store,
            reader=database.reader,
            signals=signals,
            clock=clock,
            ids=SystemIds(),
            chance=SystemChance(),
            directory=AgentDirectory(database.reader, clock),
            settings=engine_settings(settings),
        )


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncGenerator[Service]:
    """Open the use cases without a worker: runs are carried out by another process."""
    async with open_core(settings) as core:
        yield Service(core=core)


@asynccontextmanager
async def open_worker(
    core: Core, settings: Settings, catalog: Catalog | None = None
) -> AsyncGenerator[Worker]:
    """Return a worker for the catalog, or for the agents of the settings; `run` starts it."""
    catalog = catalog or load_catalog(settings.agents)
    _warn_of_sandbox_only(catalog)
    heart = LoopHeartbeat if settings.db.sqlite_path is not None else ThreadHeartbeat
    runner = LocalToolRunner(
        catalog.tools,
        slots_max=settings.worker.tool_slots_max,
        grace_s=core.settings.cancel_grace_s,
    )
    async with runner as tools:
        catalog.attach(tools.user_code)
        core.metrics.engine.slots_lost.set_function(lambda: tools.lost_slots)
        tell = catalog.tells_approvers
        yield Worker(
            core=core,
            catalog=catalog,
            tools=tools,
            policy=DefaultPolicy(),
            heartbeat=heart(core),
            notifier=None if tell is None else FunctionNotifier(tell, tools.user_code),
            beside=tuple(_sweeps(core, settings)),
        )


def _warn_of_sandbox_only(catalog: Catalog) -> None:
    """Say at the start which granted tools every call of will be denied."""
    for hosted in catalog.served():
        for grant in hosted.grants:
            spec = catalog.tools.find(grant.name, grant.version)
            if spec is not None and spec.sandbox_only:
                log.warning(
                    "every call of agent %s to %s will be denied: it %s",
                    hosted.card.agent_id,
                    grant.name,
                    MISSING_OF_SANDBOX_ONLY,
                )


def _sweeps(core: Core, settings: Settings) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Yield the verification beside the work, unless it is turned off."""
    sweep = settings.verify
    if sweep.interval_s > 0:
        terms = SweepTerms(
            interval_s=sweep.interval_s, runs_max=sweep.runs_max, events_max=sweep.events_max
        )
        yield Sweep(core=core, terms=terms).run


@asynccontextmanager
async def open_runtime(
    settings: Settings, catalog: Catalog | None = None
) -> AsyncGenerator[Runtime]:
    """Open everything in this process, and drain the worker at the end, also after an error."""
    async with (
        open_core(settings) as core,
        open_worker(core, settings, catalog) as worker,
        anyio.create_task_group() as group,
    ):
        drained = anyio.Event()
        await group.start(_work, worker, drained)
        try:
            yield Runtime(service=Service(core=core), worker=worker)
        finally:
            worker.drain()
            with anyio.CancelScope(shield=True):  # bounded by the worker's own grace period
                await drained.wait()


async def _work(
    worker: Worker,
    drained: anyio.Event,
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    try:
        async with anyio.create_task_group() as group:
            await group.start(worker.run)
            task_status.started()
    finally:
        drained.set()


# ---------------------------------------------------------------- the API


def make_application(settings: Settings, core: Core) -> Application:
    """Return the API with every binding that is served.

    What only a server needs is imported here: it costs half a second that workers and commands
    on the database need not pay.
    """
    from perdure.bindings import native
    from perdure.server.app import create_app
    from perdure.server.settings import ServerSettings
    from perdure.server.stopping import Stopping

    listen = settings.server
    server_settings = ServerSettings(
        host=listen.host,
        port=listen.port,
        insecure=listen.insecure,
        allowed_hosts=listen.allowed_hosts,
        allowed_origins=listen.allowed_origins,
        shutdown_grace_s=listen.shutdown_grace_s,
        access_log=listen.access_log,
    )
    stopping = Stopping()
    app = create_app(
        Service(core=core), server_settings, routers=native.routers(), stopping=stopping
    )
    return Application(app=app, settings=server_settings, stopping=stopping)


@asynccontextmanager
async def open_app(settings: Settings, *, worker: bool = True) -> AsyncGenerator[Application]:
    """Open the API over an embedded runtime, or without a worker over the database alone."""
    if worker:
        async with open_runtime(settings) as runtime:
            application = make_application(settings, runtime.service.core)
            yield replace(application, worker=runtime.worker)
    else:
        async with open_core(settings) as core:
            yield make_application(settings, core)
