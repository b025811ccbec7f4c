"""The rarer rows of a commit: questions to people, messages, artifacts and blobs."""

from perdure.protocol.base import to_micros
from perdure.protocol.states import InterruptStatus
from perdure.store import keeping, rules
from perdure.store.commits import Commit, InterruptClose, NewArtifact, NewInterrupt, NewMessage
from perdure.store.requests import TimerKind
from perdure.store.sqlite.rows import maybe, pack_digest, pack_id
from perdure.store.sqlite.transaction import Transaction


class NotPending(ValueError):
    """A commit closes an interrupt that is not pending, or spends one that is not there."""


def write_products(tx: Transaction, commit: Commit, run: bytes, at: int) -> None:
    """Write what most commits have none of; raise NotPending when an interrupt is not as said."""
    if commit.new_interrupts or commit.messages or commit.artifacts or commit.blobs:
        _write_owned(tx, commit, run, at)
    if commit.discards is not None:
        tx.run("discard_artifacts", run)
        for digest in commit.discards:
            tx.run("leave_blob", run, pack_digest(digest))
    for close in commit.interrupt_closes:
        _close_interrupt(tx, run, close, at)
    for begun in commit.new_executions:
        if begun.approval_id is None:
            continue
        if tx.run("spend_approval", begun.number, pack_id(begun.approval_id), run) != 1:
            raise NotPending("no such approval, or it is spent")


def _write_owned(tx: Transaction, commit: Commit, run: bytes, at: int) -> None:
    """Write rows that carry the run's tenant or thread."""
    keys = tx.one("find_run_keys", run)
    assert keys is not None, "the hot row was there"
    tenant, thread = keys
    tx.keep_blobs(run, tenant, commit.blobs, keeping.lasting_digests(commit))
    for message in commit.messages:
        _insert_message(tx, tenant, thread, run, message, at)
    for artifact in commit.artifacts:
        _insert_artifact(tx, tenant, thread, run, artifact, at)
    for new in commit.new_interrupts:
        _open_interrupt(tx, tenant, run, new, at)


def _insert_message(
    tx: Transaction, tenant: str, thread: bytes, run: bytes, new: NewMessage, at: int
) -> None:
    place = tx.one("next_position", at, thread, tenant)
    assert place is not None, "a run's thread is there"
    tx.run(
        "insert_message",
        thread,
        place[0],
        pack_id(new.message_id),
        tenant,
        run,
        new.seq,
        new.role.value,
        new.author,
        at,
        None,
    )


def _insert_artifact(
    tx: Transaction, tenant: str, thread: bytes, run: bytes, new: NewArtifact, at: int
) -> None:
    tx.run(
        "insert_artifact",
        pack_id(new.artifact_id),
        run,
        tenant,
        thread,
        new.name,
        new.version,
        new.media_type,
        pack_digest(new.digest),
        new.size,
        new.status.value,
        new.step_index,
        maybe(pack_id, new.tool_call_id),
        new.seq,
        at,
    )


def _open_interrupt(tx: Transaction, tenant: str, run: bytes, new: NewInterrupt, at: int) -> None:
    key, expires_at = pack_id(new.interrupt_id), None
    if new.expires_in_s is not None:
        expires_at = to_micros(rules.after(tx.now, new.expires_in_s))
        tx.run("insert_timer", run, TimerKind.EXPIRY.value, key, expires_at)
    tx.run(
        "insert_interrupt",
        key,
        run,
        tenant,
        new.kind.value,
        new.key,
        maybe(pack_id, new.tool_call_id),
        maybe(pack_digest, new.args_digest),
        maybe(pack_digest, new.definition_digest),
        new.opened_seq,
        expires_at,
        new.on_expiry.value,
        at,
    )


def _close_interrupt(tx: Transaction, run: bytes, close: InterruptClose, at: int) -> None:
    key = pack_id(close.interrupt_id)
    written = tx.run(
        "close_interrupt",
        close.status.value,
        close.closed_seq,
        close.answer,
        maybe(pack_digest, close.answer_digest),
        close.answered_by,
        at if close.status is InterruptStatus.ANSWERED else None,
        maybe(pack_digest, close.effective_digest or None),
        key,
        run,
    )
    if written != 1:
        raise NotPending("the interrupt is not pending")
    tx.run("delete_timer", run, TimerKind.EXPIRY.value, key)
    tx.run("delete_timer", run, TimerKind.NOTICE.value, key)
