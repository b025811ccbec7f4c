"""What stores promise about text: whatever JSON holds comes back as it went in."""

from dataclasses import replace

import pytest
from pydantic import JsonValue

from perdure.protocol.codec import DEPTH_MAX, INTEGER_MAX
from perdure.protocol.events import ActionEvent, CustomEvent, LateEvent, ResultEvent
from perdure.store.commits import NewCheckpoint
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import AgentRegistration, NewBlob
from perdure.testing.builders import (
    TO_EXECUTING,
    action_of,
    advanced,
    append,
    claimed,
    commit_of,
    late_result,
    look,
    new_call,
    new_run,
    new_thread,
    note,
    result_of,
    with_call,
    write,
)
from perdure.testing.conformance.base import Contract, history


def nested(depth: int) -> JsonValue:
    """Return an array in an array, `depth` deep."""
    value: JsonValue = "core"
    for _ in range(depth):
        value = [value]
    return value


TEXTS: dict[str, JsonValue] = {
    "NUL": "a\x00b\x00",
    "control": "".join(chr(code) for code in range(1, 0x20)) + "\x7f\x85",
    "line separators": "a\u2028b\u2029c\r\nd\re\n",
    "emoji": "👩🏽‍🚀 🇨🇭 e\u0301 \u200d",
    "right to left": "שלום \u202eabc\u202c مرحبا",
    "beyond the first plane": "𝄞 𐀀 \U0010ffff \ufffe \uffff \ufeff",
    "quoting": "\"' \\ \\u0000 \\x00 %s {} $1 :name ; -- /* */ `",
    "blank": " \t ",
    "empty": "",
    "long": "ä" * 100_000,
    "integers as text": ["9007199254740993", "-18446744073709551616", "1e400", "NaN", "007"],
    "numbers": [0, -1, INTEGER_MAX, -INTEGER_MAX, 0.1, 1e-7, 1.5e300, 5e-324, 1.0],
    "constants": [None, True, False, {}, [], [[]], {"": None}],
    "keys": {"b": 1, "a": {"\x00": "\x00", "\u2028": 2, "é": 3, "e\u0301": 4, "": 5}, "__": 6},
    "deep": nested(DEPTH_MAX - 4),
}


class TextContract(Contract):
    """Text and JSON through every payload."""

    @pytest.mark.parametrize("name", list(TEXTS))
    async def test_a_value_in_an_event_comes_back_as_it_went_in(
        self, store: Store, reader: Reader, name: str
    ) -> None:
        """F36: the same on every store."""
        value = TEXTS[name]
        held = await claimed(store)
        call = new_call(held.row, action_seq=4)
        events = (note("a", value), action_of(call, value), result_of(call, value))
        commit = commit_of(held.row, *events, path=TO_EXECUTING)
        await write(store, replace(commit, new_calls=(call,)))
        found = (await history(reader, call.run_id))[2:5]
        assert [event.raw for event in found] == [event.encoded() for event in events]
        custom, action, result = (event.data for event in found)
        assert isinstance(custom, CustomEvent)
        assert isinstance(action, ActionEvent)
        assert isinstance(result, ResultEvent)
        for returned in (custom.value, action.args, result.output):
            assert returned == value
            assert repr(returned) == repr(value)

    @pytest.mark.parametrize("name", list(TEXTS))
    async def test_an_input_and_a_message_come_back_as_they_went_in(
        self, store: Store, reader: Reader, name: str
    ) -> None:
        value = TEXTS[name]
        new = new_run(input=value)
        await store.insert_run(new)
        message = await append(store, new.thread_id, value, author="ana")
        row = await look(reader, new.run_id)
        [found] = await reader.list_messages(new.thread_id, after=1, limit=10)
        assert found == message
        assert repr(row.facts.input.inline) == repr(value)
        assert repr(found.body) == repr(value)

    @pytest.mark.parametrize("name", list(TEXTS))
    async def test_agent_state_and_late_output_come_back_as_they_went_in(
        self, store: Store, reader: Reader, name: str
    ) -> None:
        value = TEXTS[name]
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        new = NewCheckpoint(
            seq=row.hot.last_seq,
            parent_seq=None,
            step_index=0,
            agent_state=value,
            digest="a" * 64,
        )
        await advanced(store, reader, replace(commit_of(row), checkpoint=new))
        await store.record_late(late_result(call, output=value))
        checkpoint = await reader.find_checkpoint("default", call.run_id, new.seq)
        assert checkpoint is not None
        assert repr(checkpoint.agent_state) == repr(value)
        late = (await history(reader, call.run_id))[-1].data
        assert isinstance(late, LateEvent)
        assert repr(late.output) == repr(value)

    async def test_metadata_cards_and_titles_come_back_as_they_went_in(
        self, store: Store, reader: Reader
    ) -> None:
        plain: dict[str, JsonValue] = dict(TEXTS)
        thread = replace(
            new_thread(), title="שלום 👩🏽‍🚀 \u2028 '\"\\", metadata=plain, participants=[plain]
        )
        await store.create_thread(thread)
        found = await reader.find_thread("default", thread.thread_id)
        assert found == thread
        assert repr(found) == repr(thread)
        agent = AgentRegistration(agent_id="a", version="1 ✓", card=plain, digest="a" * 64)
        await store.register([agent], [])
        [registered] = await reader.list_agents()
        assert (registered.version, repr(registered.card)) == ("1 ✓", repr(plain))

    async def test_keys_and_fingerprints_are_compared_exactly(self, store: Store) -> None:
        keys = ["k", "K", "k ", " k", "\uff4b", "k\u0301", "\u1e31", "שלום", "👩🏽‍🚀", "a'b\"c\\d%"]
        runs = {key: new_run(key=key, fingerprint=f"print {key}") for key in keys}
        for new in runs.values():
            assert (await store.insert_run(new)).created
        for key, new in runs.items():
            found = await store.insert_run(new_run(key=key))
            assert found.row.facts.run_id == new.run_id
            assert found.fingerprint == new.fingerprint

    @pytest.mark.parametrize(
        "data", [b"", b"\x00", bytes(range(256)), b"x" * 1_000_000], ids=["0", "1", "256", "1M"]
    )
    async def test_bytes_come_back_as_they_went_in(
        self, store: Store, reader: Reader, data: bytes
    ) -> None:
        blob = NewBlob(digest="c" * 64, media_type="application/octet-stream", data=data)
        await store.insert_run(new_run(blobs=(blob,)))
        assert await reader.read_blob("default", blob.digest) == data
