"""What an installation can set, and where a value comes from.

A flag goes before the environment (`PERDURE_*`, nested by `__`), that before `./perdure.toml` or
else `[tool.perdure]` of `./pyproject.toml`, that before `$XDG_CONFIG_HOME/perdure/config.toml`,
and that before the default. Units stand in the names: `_s` is seconds.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic import model_validator as validates
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError
from typing_extensions import TypeIs

from perdure.protocol.errors import Invalid
from perdure.protocol.runs import QUEUE_DEFAULT, QueueName
from perdure.protocol.tools import CALLBACK_S_MAX
from perdure.protocol.wording import first_problem

DB_URL_DEFAULT = "sqlite:///.perdure/perdure.db"

_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")
_FROM_PLATFORM = re.compile(r"(tcp|udp|sctp)://")
_PASSWORD_PARAMETER = re.compile(r"([^&=]*(?:password|passwd|secret)[^&=]*=)[^&]*", re.IGNORECASE)


def _split(value: object) -> object:
    """Return the items of a comma-separated text, as lists stand in the environment."""
    if not isinstance(value, str):
        return value
    return tuple(item.strip() for item in value.split(",") if item.strip())


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Queues = Annotated[tuple[QueueName, ...], NoDecode, BeforeValidator(_split)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DatabaseSettings(_Section):
    """Where runs are kept."""

    url: str = Field(
        default=DB_URL_DEFAULT,
        description="`sqlite:///relative/path`, `sqlite:////absolute/path` or `postgresql://…`",
    )
    direct_url: str | None = Field(
        default=None,
        description="with `pgbouncer`: the URL that leads to the PostgreSQL server itself",
    )
    pgbouncer: bool = Field(
        default=False,
        description="`url` leads through a pooler in transaction mode; prepares nothing",
    )
    pool_max: int = Field(
        default=8, ge=1, le=1000, description="connections at most for reading (PostgreSQL)"
    )

    @field_validator("url", "direct_url")
    @classmethod
    def _known_scheme(cls, value: str | None) -> str | None:
        if value is None or value.startswith(_POSTGRES):
            return value
        if value.startswith(_SQLITE) and value != _SQLITE:
            return value
        raise ValueError("not of the form sqlite:///path or postgresql://…")

    @property
    def sqlite_path(self) -> Path | None:
        """Return the file of a SQLite URL, None for another database."""
        if not self.url.startswith(_SQLITE):
            return None
        return Path(self.url.removeprefix(_SQLITE)).expanduser()


class ListenSettings(_Section):
    """How the API server is reached."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(
        default=8733, ge=0, le=65535, description="port to listen on; 0: any that is free"
    )
    insecure: bool = Field(
        default=False, description="listen beyond loopback although there is no authentication yet"
    )
    allowed_hosts: Names = Field(
        default=(), description="Host names accepted beside the loopback ones; `*`: any"
    )
    allowed_origins: Names = Field(
        default=(), description="origins whose pages may send changing requests beside our own"
    )
    shutdown_grace_s: float = Field(
        default=10.0, gt=0, le=3600, description="seconds that open requests get at shutdown"
    )
    access_log: bool = Field(default=True, description="write one log line for each request")


class WorkerSettings(_Section):
    """How a worker works."""

    queues: Queues = Field(
        default=(QUEUE_DEFAULT,), min_length=1, max_length=100, description="queues it serves"
    )
    runs_max: int = Field(default=64, ge=1, le=10_000, description="runs held at once")
    tool_slots_max: int = Field(default=128, ge=1, le=10_000, description="tool calls at once")
    tool_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="seconds for a tool call that declares no timeout",
    )
    callback_timeout_s: float = Field(
        default=86_400.0,
        gt=0,
        le=CALLBACK_S_MAX,
        description="seconds for the callback of a tool that answers `pending` and names no time",
    )
    lease_ttl_s: float = Field(
        default=30.0,
        ge=0.5,
        le=3600,
        description="seconds after which a silent worker loses its runs",
    )
    heartbeat_s: float | None = Field(
        default=None,
        gt=0,
        le=1200,
        description="seconds between renewals; unset: a third of the lease",
    )
    poll_interval_s: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="seconds between looks for work, and for events, when no signal comes",
    )
    drain_grace_s: float = Field(
        default=20.0, ge=0, le=3600, description="seconds that held runs get at shutdown"
    )
    compensation_deadline_s: float = Field(
        default=900.0,
        gt=0,
        le=86_400,
        description="seconds after a cancel, or after the runs below have ended since, in which "
        "undoing a call may begin; what is left then is reported as not undone",
    )

    on_incompatible: Literal["fail", "repair"] = Field(
        default="fail",
        description="what becomes of a run whose log is of a schema version that this release "
        "cannot carry on: `fail`: it ends CHECKPOINT_INCOMPATIBLE; `repair`: it is put aside",
    )
    on_damage: Literal["wait", "return"] = Field(
        default="wait",
        description="what becomes of a run whose log does not fold to its checkpoint: `wait`: it is "
        "put aside for a person; `return`: where no side effect lies behind its last consistent "
        "checkpoint it goes on from there as a new run, else it is put aside",
    )

    @validates(mode="after")
    def _beats_in_time(self) -> Self:
        if self.beat_s > self.lease_ttl_s / 2:
            raise ValueError("heartbeat_s is more than half of lease_ttl_s")
        return self

    @property
    def beat_s(self) -> float:
        """Return the time between two renewals."""
        return self.lease_ttl_s / 3 if self.heartbeat_s is None else self.heartbeat_s


class TenantRetention(_Section):
    """How long the history of a tenant's ended runs is kept."""

    succeeded_s: float | None = Field(
        default=None, ge=0, description="seconds after a success; unset: for ever"
    )
    failed_s: float | None = Field(
        default=None, ge=0, description="seconds after a failure or cancel; unset: for ever"
    )


class RetentionSettings(TenantRetention):
    """How long the history of ended runs is kept: events, checkpoints and their large values.

    The run, its terminal event, its calls, questions, artifacts and messages stay.
    """

    tenants: dict[str, TenantRetention] = Field(
        default_factory=dict[str, TenantRetention],
        description="times of single tenants, by id; one that is named here has only its own",
    )
    interval_s: float = Field(default=3600.0, gt=0, le=86_400, description="seconds between sweeps")
    blobs_s: float = Field(
        default=86_400.0,
        ge=0,
        description="seconds that content stays after the last run that used it",
    )


class ChildrenSettings(_Section):
    """What runs may start below them, and how they end together."""

    depth_max: int = Field(
        default=5, ge=0, le=100, description="how many levels of child runs a tree may have"
    )
    open_max: int = Field(
        default=128, ge=1, le=10_000, description="unfinished child runs of one run at once"
    )
    detached_max: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="detached child runs that one run may start in all",
    )
    cancel_deadline_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="seconds that child runs get to end once their parent is to end; what goes on "
        "then is ended as ORPHANED; so long a worker leaves what became of a cancelled run's call to "
        "one that can look it up",
    )


class VerifySettings(_Section):
    """The verification that a worker does beside its work, a page of runs at a time."""

    interval_s: float = Field(
        default=60.0, ge=0, le=86_400, description="seconds between two pages; 0: never"
    )
    runs_max: int = Field(default=20, ge=1, le=1000, description="runs of a page")
    events_max: int = Field(
        default=1000,
        ge=1,
        le=100_000,
        description="runs with a longer log are left to `perdure verify`",
    )


class LogSettings(_Section):
    """What is logged, to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is written"
    )
    format: Literal["auto", "console", "json"] = Field(
        default="auto", description="`auto`: console on a terminal, else one JSON object a line"
    )


class Settings(BaseSettings):
    """All settings. Made by `load_settings`; made directly, it holds the defaults."""

    model_config = SettingsConfigDict(
        env_prefix="PERDURE_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    db: DatabaseSettings = Field(default=DatabaseSettings())
    signals: Literal["auto", "local", "polled", "postgres", "off"] = Field(
        default="auto",
        description="how processes wake each other; `auto`: `polled` on SQLite, else `postgres`; "
        "`local`: within one process; `off`: everybody looks every `poll_interval_s`",
    )
    agents: Names = Field(
        default=(), description="agent registries to serve, as `package.module:registry`"
    )
    server: ListenSettings = Field(default=ListenSettings())
    worker: WorkerSettings = Field(default=WorkerSettings())
    retention: RetentionSettings = Field(default=RetentionSettings())
    children: ChildrenSettings = Field(default=ChildrenSettings())
    verify: VerifySettings = Field(default=VerifySettings())
    log: LogSettings = Field(default=LogSettings())

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *args: Any, **sources: Any
    ) -> tuple[Any, ...]:
        """Take only what is given: `load_settings` reads the sources, in one order."""
        del settings_cls, args
        return (sources["init_settings"],)


@dataclass(frozen=True, slots=True)
class Source:
    """A place that settings come from, with what it says."""

    name: str
    values: Mapping[str, object]


def load_settings(flags: Mapping[str, object] | None = None) -> Settings:
    """Return the settings of this process; raise Invalid that names the source of a bad value."""
    sources = read_sources(flags or {})
    merged: dict[str, object] = {}
    for source in reversed(sources):
        merged = _merged(merged, source.values)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        path, reason = first_problem(error)
        source = source_of(sources, path)
        raise Invalid(f"setting {'.'.join(path)} ({source}): {reason}") from None


def read_sources(flags: Mapping[str, object]) -> list[Source]:
    """Return what each source says, the strongest first."""
    return [
        Source("flag", flags),
        Source("environment", _environment()),
        *_files(),
    ]


def source_of(sources: list[Source], path: tuple[str, ...]) -> str:
    """Return the name of the source that a value comes from, `default` when none has it.

    The path may lead on into the value, to an item of a list.
    """
    for source in sources:
        found: object = source.values
        for part in path:
            if not _is_table(found):
                break
            found = found.get(part)
        if found is not None:
            return source.name
    return "default"


def flattened(settings: Settings) -> dict[str, object]:
    """Return every setting by its dotted name, passwords masked."""
    found: dict[str, object] = {}
    for name, value in settings.model_dump(mode="json").items():
        if _is_table(value):
            found |= {f"{name}.{inner}": _shown(item) for inner, item in value.items()}
        else:
            found[name] = _shown(value)
    return found


def masked_url(url: str) -> str:
    """Return a database URL without its passwords: all from `user:` to the last @, and the value of
    every parameter whose name has to do with a password.
    """
    scheme, separator, rest = url.partition("://")
    netloc = re.split(r"[/?#]", rest, maxsplit=1)[0]
    access, at, _ = (netloc if "@" in netloc else rest).rpartition("@")
    if at:
        user, colon, _ = access.partition(":")
        rest = (f"{user}:***" if colon else user) + rest[len(access) :]
    place, mark, query = rest.partition("?")
    return scheme + separator + place + mark + _PASSWORD_PARAMETER.sub(r"\1***", query)


def _shown(value: object) -> object:
    return masked_url(value) if isinstance(value, str) and "://" in value else value


def _is_table(value: object) -> TypeIs[Mapping[str, object]]:
    return isinstance(value, Mapping)


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        if _is_table(value) and _is_table(old):
            result[name] = _merged(old, value)
        elif value is not None:
            result[name] = value
    return result


def _environment() -> Mapping[str, object]:
    """Return what the environment sets; raise Invalid for a name that was meant to set something.

    Other names are nobody's mistake: container platforms make some from the names of services
    (`PERDURE_SERVER_PORT=tcp://…`).
    """
    meant = {name.replace("__", "_"): name for name in _names()}
    for name, value in os.environ.items():
        head, nested, _ = name.partition("__")
        if not name.startswith("PERDURE_") or name in meant.values():
            continue
        if nested and head.removeprefix("PERDURE_").lower() not in Settings.model_fields:
            raise Invalid(f"environment: {name} is no setting; `perdure config` lists all")
        if name in meant and not _FROM_PLATFORM.match(value):
            raise Invalid(f"environment: {name} is no setting; its name is {meant[name]}")
    try:
        return EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise Invalid(f"environment: {error}") from None


def _names() -> Iterator[str]:
    """Give the names that set something, as they stand in the environment."""
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, _Section):
            yield from (f"PERDURE_{name}__{inner}".upper() for inner in section.model_fields)
        else:
            yield f"PERDURE_{name}".upper()


def _files() -> list[Source]:
    found: list[Source] = []
    own, project = Path("perdure.toml"), Path("pyproject.toml")
    if (values := _read_toml(own)) is not None:
        found.append(Source(f"./{own}", values))
    elif (values := _read_toml(project)) is not None:
        table: object = values.get("tool", {})
        section = table.get("perdure") if _is_table(table) else None
        if _is_table(section):
            found.append(Source(f"./{project}", section))
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111  # no home is no error
    personal = Path(home) / "perdure" / "config.toml"
    if (values := _read_toml(personal)) is not None:
        found.append(Source(str(personal), values))
    return found


def _read_toml(path: Path) -> Mapping[str, object] | None:
    """Return a file's content; None when there is none, or none that this user may see."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    except UnicodeDecodeError:
        raise Invalid(f"{path}: not UTF-8") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"{path}: {error}") from None
