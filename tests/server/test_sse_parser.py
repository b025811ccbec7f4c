"""The reference parser follows the HTML standard, whatever way the bytes are split."""

from hypothesis import given
from hypothesis import strategies as st

from perdure.server.sse import comment, frame
from perdure.service.events import EncodedEvent, one_line
from perdure.testing.sse_client import SseParser


def _events(data: bytes) -> list[tuple[str, str, str]]:
    return [(event.id, event.type, event.data) for event in SseParser().feed(data)]


def test_the_examples_of_the_standard() -> None:
    assert _events(b"data: YHOO\ndata: +2\ndata: 10\n\n") == [("", "message", "YHOO\n+2\n10")]
    assert _events(b": test\n\ndata: first\nid: 1\n\ndata:second\nid\n\ndata:  third\n\n") == [
        ("1", "message", "first"),
        ("", "message", "second"),
        ("", "message", " third"),
    ]
    assert _events(b"data\n\ndata\ndata\n\ndata:") == [("", "message", ""), ("", "message", "\n")]
    assert _events(b"data:test\n\ndata: test\n\n") == [("", "message", "test")] * 2


def test_all_line_ends_and_a_byte_order_mark_are_read() -> None:
    assert _events(b"\xef\xbb\xbfdata: a\r\rdata: b\r\n\r\ndata: c\n\n") == [
        ("", "message", "a"),
        ("", "message", "b"),
        ("", "message", "c"),
    ]


def test_an_id_alone_moves_the_cursor_and_dispatches_nothing() -> None:
    parser = SseParser()
    assert parser.feed(b"id: 7\n\n") == []
    assert parser.last_event_id == "7"
    parser.feed(b"id: 8\ndata: x\n")
    assert parser.last_event_id == "7"


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.data())
def test_frames_survive_any_split(texts: list[str], data: st.DataObject) -> None:
    clean = [text.encode("utf-8", "replace").decode() for text in texts]
    from perdure.protocol.codec import encode

    events = [
        EncodedEvent(seq, "custom", one_line(encode(text)), is_end=False)
        for seq, text in enumerate(clean, start=1)
    ]
    wire = b"retry: 2000\n\n" + b"".join(frame(event) + comment("hb") for event in events)
    assert wire.decode().splitlines() == wire.decode().split("\n")[:-1]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    parser = SseParser()
    found = [
        event
        for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)
        for event in parser.feed(wire[start:end])
    ]
    assert [event.json() for event in found] == clean  # the data is any JSON here
    assert [event.id for event in found] == [str(event.seq) for event in events]
    assert parser.last_event_id == str(len(events))
