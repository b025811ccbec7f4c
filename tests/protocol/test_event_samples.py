"""One stored sample of every event type and schema version: the present reader takes each (R-6.9).

A sample is never edited: it is what an older release wrote. A new type or a new schema version
gets a sample of its own beside them.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from perdure.ops.reference.schemas import schemas
from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.codec import encode
from perdure.protocol.events import CancelEvent, StateEvent
from perdure.protocol.log import (
    EVENT_TYPES,
    DamagedEvent,
    EventData,
    NewEvent,
    Unknown,
    parse_event_data,
)
from perdure.protocol.schema import Incompatible, check_version
from perdure.protocol.stability import PROVISIONAL_TYPES, Stability, level_of
from perdure.store.memory import MemoryDatabase
from perdure.store.ports import Database
from perdure.store.postgres import PostgresDatabase
from perdure.store.sqlite import SqliteDatabase
from perdure.testing.builders import TO_SUCCEEDED, claimed, commit_of, write
from perdure.testing.conformance.base import history

FOLDER = Path(__file__).parent / "samples"


@dataclass(frozen=True, slots=True)
class Sample:
    """An event's data as it was stored."""

    type: str
    schema_version: int
    data: Any
    lifted: Any = None
    """What `data` is in the present form, where that differs."""

    def read(self) -> EventData | Unknown:
        """Return the data as this release reads it."""
        return parse_event_data(self.type, encode(self.data), self.schema_version)


def _samples() -> list[Sample]:
    paths = sorted(FOLDER.glob("v*/*.json"))
    return [Sample(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


SAMPLES = _samples()
_NAMES = [f"v{sample.schema_version}-{sample.type}" for sample in SAMPLES]
_BUILT = schemas()


@pytest.mark.parametrize("sample", SAMPLES, ids=_NAMES)
def test_a_stored_sample_is_read_whole(sample: Sample) -> None:
    """R-6.9, R-20.1: what an older release stored is read, and nothing of it is dropped."""
    data = sample.read()
    assert not isinstance(data, Unknown)
    wanted = sample.data if sample.lifted is None else sample.lifted
    assert json.loads(NewEvent(data=data, step_index=0).encoded()) == wanted


@pytest.mark.parametrize("sample", SAMPLES, ids=_NAMES)
def test_a_sample_as_it_is_sent_fits_the_published_schema(sample: Sample) -> None:
    """R-1.1, R-6.9: the schema of each type is that of the data clients get."""
    data = sample.read()
    sent = data.model_dump(mode="json", exclude={"type"})
    if isinstance(data, StateEvent):
        sent |= {"status": "CANCELED", "code": "RUN_CANCELLED"}
    jsonschema_rs.validator_for(_BUILT[f"event-{sample.type}"]).validate(sent)


@pytest.mark.parametrize("version", [-1, SCHEMA_VERSION + 1])
def test_what_is_too_old_or_too_new_is_told_apart(version: int) -> None:
    """R-20.1, R-20.4: a later version is read as far as it is known; it is not carried on."""
    with pytest.raises(Incompatible):
        check_version(version)
    raw = b'{"action":"interrupt","epoch":1,"by":"a","later":true}'
    if version < 0:
        with pytest.raises(DamagedEvent):
            parse_event_data("cancel", raw, version)
    else:
        assert isinstance(parse_event_data("cancel", raw, version), CancelEvent)


def test_old_data_that_no_upcaster_takes_is_damaged() -> None:
    """R-20.1."""
    for raw in (b"[]", b'{"error_code":17}'):
        with pytest.raises(DamagedEvent):
            parse_event_data("result", raw, 0)


def test_what_a_damaged_event_lacks_is_told_in_a_line() -> None:
    """R-19.9: `verify` prints it, a finding a line."""
    with pytest.raises(DamagedEvent) as told:
        parse_event_data("cancel", b'{"action":"interrupt"}')
    assert "epoch: is missing" in str(told.value)
    assert "\n" not in str(told.value)


def test_every_type_has_a_sample_of_the_present_version() -> None:
    """R-6.9."""
    present = {sample.type for sample in SAMPLES if sample.schema_version == SCHEMA_VERSION}
    assert present == set(EVENT_TYPES)


def test_a_sample_shows_every_field_of_its_type() -> None:
    """R-6.9: a sample with a field left out would not notice that the field was renamed."""
    for sample in SAMPLES:
        if sample.schema_version == SCHEMA_VERSION:
            fields = set(_BUILT[f"event-{sample.type}"]["properties"]) - {"status", "code"}
            assert fields - {"status", "code"} <= set(sample.data), sample.type


def test_every_field_has_a_level() -> None:
    """R-6.9: types that are not written yet promise nothing but that they are accepted."""
    for name in EVENT_TYPES:
        levels = {level_of(name, field) for field in _BUILT[f"event-{name}"]["properties"]}
        assert (levels == {Stability.PROVISIONAL}) is (name in PROVISIONAL_TYPES), name


def test_a_type_of_a_later_release_passes_by_and_a_damaged_event_does_not() -> None:
    """R-6.9, R-20.4: unknown types and fields are passed through; nonsense is told apart."""
    assert parse_event_data("teleport", b'{"to":1}') == Unknown(type="teleport")
    known = parse_event_data("cancel", b'{"action":"interrupt","epoch":1,"by":"a","later":true}')
    assert not isinstance(known, Unknown)
    with pytest.raises(DamagedEvent):
        parse_event_data("cancel", b'{"action":"interrupt"}')


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Database]:
    """An empty database of each kind."""
    opened: dict[str, Any] = {
        "memory": MemoryDatabase,
        "sqlite": lambda: SqliteDatabase(tmp_path / "perdure.db", synchronous="off"),
        "postgres": lambda: PostgresDatabase(request.getfixturevalue("postgres_dsn")),
    }
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(opened[request.param]())


async def test_every_store_takes_every_type_and_gives_it_back(database: Database) -> None:
    """SCH-07: no type meets a column that does not know it; each is read back equal."""
    held = await claimed(database.store)
    events = [
        NewEvent(data=parsed, step_index=7)
        for sample in SAMPLES
        if not isinstance(parsed := sample.read(), Unknown)
        and not isinstance(parsed, StateEvent)  # the path below has those of a whole run
    ]
    commit = commit_of(held.row, *events, path=TO_SUCCEEDED)
    await write(database.store, commit)
    found = (await history(database.reader, commit.run_id))[2:]
    assert {event.type for event in found} == set(EVENT_TYPES)
    assert [event.data for event in found] == [event.data for event in commit.events]
    assert [event.raw for event in found] == [event.encoded() for event in commit.events]
    assert {event.step_index for event in found} == {7, 0}
