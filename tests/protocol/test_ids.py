"""Ids: a prefix and a UUIDv7, convertible without loss (R-1.4, decision 32)."""

from uuid import UUID

import pytest
import uuid_utils.compat
from hypothesis import given
from hypothesis import strategies as st

from perdure.protocol import ids
from perdure.protocol.errors import Malformed
from perdure.runtime import SystemIds

PREFIXES = (
    ids.RUN,
    ids.THREAD,
    ids.TOOL_CALL,
    ids.INTERRUPT,
    ids.CHECKPOINT,
    ids.ARTIFACT,
    ids.MESSAGE,
)


@given(prefix=st.sampled_from(PREFIXES), value=st.uuids())
def test_an_id_becomes_its_uuid_and_comes_back(prefix: str, value: UUID) -> None:
    """R-1.4: some protocols demand the bare UUID; nothing is lost on the way."""
    made = ids.make_id(prefix, value)
    assert ids.uuid_of(made) == value
    assert ids.make_id(prefix, ids.uuid_of(made)) == made
    assert ids.make_id(prefix, UUID(str(value))) == made
    assert ids.is_id(prefix, made)
    assert ids.check_id(prefix, made, "id") == made


def test_a_fresh_id_is_a_uuid_of_version_7_in_order_of_time() -> None:
    """R-1.4: unguessable and ordered by time."""
    made = [SystemIds().new(ids.RUN) for _ in range(1000)]
    assert {ids.uuid_of(identifier).version for identifier in made} == {7}
    assert len(set(made)) == 1000
    first, last = (ids.uuid_of(made[place]).int >> 80 for place in (0, -1))
    assert first <= last
    assert uuid_utils.compat.uuid7().int >> 80 >= last
    random_parts = {ids.uuid_of(identifier).int & (2**32 - 1) for identifier in made}
    assert len(random_parts) > 990, "the last bits are counted up, not drawn"


@given(run=st.uuids(), number=st.integers(min_value=0, max_value=10**9 - 1))
def test_ids_of_events_and_steps_derive_from_their_run(run: UUID, number: int) -> None:
    """Decision 32, R-1.4."""
    run_id = ids.make_id(ids.RUN, run)
    assert ids.event_id(run_id, number) == f"evt_{run.hex}_{number}"
    assert ids.parse_step_id(ids.step_id(run_id, number)) == (run_id, number)
    assert len(ids.span_id(run_id, number)) == 16


@pytest.mark.parametrize(
    "text",
    [
        "",
        "run_",
        "run_1",
        "thr_" + "0" * 32,
        "run_" + "0" * 33,
        "run_" + "G" * 32,
        "RUN_" + "0" * 32,
    ],
)
def test_what_is_no_id_of_the_kind_is_refused(text: str) -> None:
    """R-1.4, R-21.3."""
    assert not ids.is_id(ids.RUN, text)
    with pytest.raises(Malformed) as refused:
        ids.check_id(ids.RUN, text, "run_id")
    assert refused.value.field == "run_id"
