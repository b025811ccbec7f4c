"""A commit with all that can be encoded before it reaches the writer thread."""

from dataclasses import dataclass
from typing import Any, Final

from perdure.protocol.codec import encode
from perdure.protocol.log import TYPE_NUMBER
from perdure.protocol.states import TERMINAL, IllegalTransition, RunState
from perdure.store import rules
from perdure.store.commits import CallUpdate, Commit
from perdure.store.sqlite.rows import pack_call, pack_digest, pack_id, plain

_WORKING: Final = frozenset({RunState.PLANNING, RunState.EXECUTING})
_BEFORE: Final = _WORKING | {RunState.PENDING}


@dataclass(slots=True)
class Prepared:
    """A commit with what was encoded. `is_plain`: the set-oriented statements may write it."""

    commit: Commit
    run: bytes
    commit_id: bytes
    is_plain: bool
    values: tuple[Any, ...]
    events: list[tuple[int, int, bytes]]
    calls: list[tuple[Any, ...]]
    updates: list[tuple[Any, ...]]
    agent_state: bytes
    starts: bool
    terminal_seq: int | None

    @property
    def ends(self) -> bool:
        """Tell whether the run ends."""
        return self.commit.hot.state in TERMINAL


def prepare(commit: Commit) -> Prepared:
    """Encode a commit; raises ValueError or TypeError for what cannot be encoded."""
    run = pack_id(commit.run_id)
    return Prepared(
        commit=commit,
        run=run,
        commit_id=pack_id(commit.commit_id),
        is_plain=_is_plain(commit),
        values=_hot_values(commit),
        events=[
            (TYPE_NUMBER[event.data.type], event.step_index, event.encoded())
            for event in commit.events
        ],
        calls=[pack_call(run, call) for call in commit.new_calls],
        updates=[_pack_update(run, update) for update in commit.call_updates],
        agent_state=encode(commit.checkpoint.agent_state) if commit.checkpoint else b"",
        starts=rules.starts(commit),
        terminal_seq=rules.terminal_seq(commit) if commit.hot.state in TERMINAL else None,
    )


def _hot_values(commit: Commit) -> tuple[Any, ...]:
    """Return the columns of the hot row that a plain commit sets, in the order of `advance_run`."""
    hot, used = commit.hot, commit.hot.counters
    return (
        str(hot.state),
        hot.step_index,
        len(commit.events),
        hot.faults,
        None if hot.state in TERMINAL else plain(hot.parked_on),
        plain(hot.waiting_kind),
        plain(hot.code),
        hot.open_calls,
        hot.open_interrupts,
        hot.open_children,
        used.model_calls,
        used.tool_calls,
        used.input_tokens,
        used.output_tokens,
        used.cost,
        used.waiting_ms,
        used.retries,
        hot.checkpoint_seq,
    )


def _pack_update(run: bytes, update: CallUpdate) -> tuple[Any, ...]:
    digest = update.effective_digest
    return (
        pack_id(update.tool_call_id),
        run,
        str(update.status),
        pack_digest(digest) if digest else None,
        update.external_ref,
        update.result_seq,
    )


def _is_plain(commit: Commit) -> bool:
    """Tell whether a holder takes a working run a legal step on, or ends it.

    Such a commit changes no timer but those of an end and makes no entry in `ready`: what it
    writes follows from the commit alone, once the fence is passed.
    """
    state, gives_up = commit.hot.state, commit.attempt_end is not None
    if (
        commit.guard.token is None
        or commit.close_in_s is not None
        or commit.new_children
        or commit.reports_to is not None
        or commit.reported
        or commit.new_callbacks
        or commit.callbacks_over
        or commit.notices
        or commit.handed_to is not None
        or commit.unmoved_since is not None
        or commit.state_values
        or commit.guard.from_state not in _BEFORE
        or not ((state in TERMINAL and gives_up) or (state in _WORKING and not gives_up))
    ):
        return False
    try:
        rules.check_path(commit)
    except IllegalTransition:
        return False
    return True
