"""Formal products and the content they refer to."""

import re

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import ArtifactEvent
from perdure.protocol.records import ArtifactRow
from perdure.protocol.states import TERMINAL, ArtifactStatus, CancelOption

_DIGEST = re.compile(r"[0-9a-f]{64}")


@rule(
    "I41",
    "The versions of an artifact's name are 1 to n within a run, or go on from the shared history.",
)
def versions_gapless(record: RunRecord) -> Found:
    versions: dict[str, list[int]] = {}
    for row in record.artifacts:
        versions.setdefault(row.name, []).append(row.version)
    for name, found in versions.items():
        shared = record.sharing.artifacts.get(name, 0)
        if sorted(found) != list(range(shared + 1, shared + len(found) + 1)):
            yield name, f"its versions are {sorted(found)[:20]}"


@rule(
    "I42",
    "An artifact has exactly one event, which says the same, and its content is stored, unless it "
    "is discarded, and has its digest; every artifact event has its artifact.",
    needs_content=True,
)
def one_event(record: RunRecord) -> Found:
    events: dict[str, list[tuple[int, ArtifactEvent]]] = {}
    for line, data in record.of(ArtifactEvent):
        events.setdefault(data.artifact_id, []).append((line.seq, data))
    for row in record.artifacts:
        found = events.pop(row.artifact_id, [])
        seqs = [seq for seq, _ in found]
        if seqs != [row.seq]:
            yield row.artifact_id, f"its row names event {row.seq}, the log has {seqs}"
        elif _differs(row, found[0][1]):
            yield row.artifact_id, f"its row and event {row.seq} differ"
        blob = record.blobs.get(row.digest)
        if blob is None or not blob.found:
            if row.status is ArtifactStatus.DISCARDED:
                continue
            yield row.artifact_id, f"the content {row.digest} is not stored"
        elif not blob.is_sound:
            yield row.artifact_id, f"the content {row.digest} has another digest"
    for artifact_id, found in events.items():
        yield artifact_id, f"event {found[0][0]} commits it, and it has no row"


@rule(
    "I77",
    "The artifacts of a run, but for adopted ones, are discarded exactly when it has ended after a "
    "cancel that asks for it.",
)
def discarded_as_asked(record: RunRecord) -> Found:
    asked = CancelOption.DISCARD_ARTIFACTS in record.hot.cancel_options
    due = asked and record.hot.state in TERMINAL
    for row in record.artifacts:
        if row.status is ArtifactStatus.ADOPTED:
            continue
        if due and row.status is not ArtifactStatus.DISCARDED:
            yield row.artifact_id, f"it is {row.status}, and was to be discarded"
        elif row.status is ArtifactStatus.DISCARDED and not due:
            yield row.artifact_id, "it is discarded, and no cancel asks for it"


def _differs(row: ArtifactRow, data: ArtifactEvent) -> bool:
    return (row.name, row.version, row.digest, row.size, row.media_type, row.tool_call_id) != (
        data.name,
        data.version,
        data.digest,
        data.size,
        data.media_type,
        data.tool_call_id,
    )


@rule("I43", "Content is kept under an opaque digest, never under a path.")
def opaque_keys(record: RunRecord) -> Found:
    for row in record.artifacts:
        if not _DIGEST.fullmatch(row.digest):
            yield row.artifact_id, f"its content is kept under {row.digest[:100]!r}"
    for digest in record.blobs:
        if not _DIGEST.fullmatch(digest):
            yield "run", f"it refers to content under {digest[:100]!r}"


@rule(
    "H7",
    "Content that a run refers to by digest is stored and has that digest.",
    needs_content=True,
)
def content_is_kept(record: RunRecord) -> Found:
    products = {row.digest for row in record.artifacts}
    for digest, blob in record.blobs.items():
        if digest in products:
            continue
        if not blob.found:
            yield "run", f"the content {digest} is not stored"
        elif not blob.is_sound:
            yield "run", f"the content {digest} has another digest"


RULES = (versions_gapless, one_event, discarded_as_asked, opaque_keys, content_is_kept)
