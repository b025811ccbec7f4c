"""Heartbeats: leases prolonged on a connection of their own, on whatever loop they are sent from.

A busy row (its commit is being written) is not waited for: it is tried again for half a second, and
then answered as busy beside all the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import anyio

from perdure.protocol.ids import hex_of
from perdure.store.postgres.driver import Connection
from perdure.store.postgres.lanes import LaneOfEachLoop
from perdure.store.postgres.statements import SQL
from perdure.store.requests import LeaseKey, Renewal

TRIES_MAX = 20
_PAUSE_S = 0.025

Epochs = dict[str, int]


@dataclass(slots=True)
class _Found:
    """The cancel epochs of runs: with a lease that was prolonged, lost, or held in a busy row."""

    held: Epochs = field(default_factory=dict[str, int])
    lost: Epochs = field(default_factory=dict[str, int])
    busy: Epochs = field(default_factory=dict[str, int])

    def answer(self, lease: LeaseKey, token: int) -> Renewal:
        """Return what became of a lease; `token` is the one of its run that was asked for."""
        key = hex_of(lease.run_id)
        busy = key in self.busy
        epochs = self.held if key in self.held else self.busy if busy else self.lost
        return Renewal(
            run_id=lease.run_id,
            held=epochs is not self.lost and token == lease.token,
            cancel_epoch=epochs.get(key, 0),
            busy=busy,
        )


class Heartbeat:
    """Renews leases from any event loop."""

    def __init__(self, dsn: str, clock: Callable[[], datetime] | None) -> None:
        self._lanes = LaneOfEachLoop(dsn)
        self._clock = clock

    async def close(self) -> None:
        """Close the connections."""
        await self._lanes.close()

    async def renew(
        self, worker_id: str, leases: Sequence[LeaseKey], ttl_s: float
    ) -> list[Renewal]:
        """See `Store.renew_leases`. An expired lease that nobody took away is prolonged."""
        if not leases:
            return []
        clock = None if self._clock is None else self._clock()
        tokens = {hex_of(lease.run_id): lease.token for lease in leases}
        lane = await self._lanes.here()
        found = await lane.run(lambda c: _renew(c, worker_id, tokens, ttl_s, clock))
        return [found.answer(lease, tokens[hex_of(lease.run_id)]) for lease in leases]


async def _renew(
    connection: Connection,
    worker_id: str,
    tokens: dict[str, int],
    ttl_s: float,
    clock: datetime | None,
) -> _Found:
    """Prolong what is held; try busy rows again, and wait for none."""
    found = _Found()
    pending = sorted(tokens)
    for tries in range(TRIES_MAX):
        if tries:
            await anyio.sleep(_PAUSE_S)
        arguments = (pending, [tokens[key] for key in pending], clock, ttl_s, worker_id)
        for row in await connection.fetch(SQL["renew_leases"], *arguments):
            found.held[row["run_id"].hex] = row["cancel_epoch"]
        pending = [key for key in pending if key not in found.held]
        if not pending:
            break
        await _sort_out(connection, worker_id, tokens, pending, found)
        pending = sorted(found.busy)
        if not pending:
            break
    return found


async def _sort_out(
    connection: Connection,
    worker_id: str,
    tokens: dict[str, int],
    keys: Sequence[str],
    found: _Found,
) -> None:
    """Note which of the leases that were not prolonged are held, so their rows are busy."""
    found.busy.clear()
    for row in await connection.fetch(SQL["find_leases"], list(keys)):
        key: str = row["run_id"].hex
        is_mine = row["lease_owner"] == worker_id and row["lease_token"] == tokens[key]
        (found.busy if is_mine else found.lost)[key] = row["cancel_epoch"]
