"""Heartbeats: leases prolonged on a connection of their own, on whatever loop they are sent from.

A busy row (its commit is being written) is not waited for: it is tried again a few times, and only
the last try waits, for no longer than the connection's lock timeout.
"""

from collections.abc import Callable, Sequence
from datetime import datetime

import anyio

from perdure.protocol.ids import hex_of
from perdure.store.commits import LeaseKey, Renewal
from perdure.store.postgres.driver import Connection
from perdure.store.postgres.lanes import LaneOfEachLoop
from perdure.store.postgres.statements import SQL

TRIES_MAX = 5
_PAUSE_S = 0.02

Epochs = dict[str, int]


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
        held, others = await lane.run(lambda c: _renew(c, worker_id, tokens, ttl_s, clock))
        return [
            Renewal(
                run_id=lease.run_id,
                held=held.get(key := hex_of(lease.run_id)) is not None
                and tokens[key] == lease.token,
                cancel_epoch=held.get(key, others.get(key, 0)),
            )
            for lease in leases
        ]


async def _renew(
    connection: Connection,
    worker_id: str,
    tokens: dict[str, int],
    ttl_s: float,
    clock: datetime | None,
) -> tuple[Epochs, Epochs]:
    """Return the epochs of the leases that were prolonged, and of the runs that are lost."""
    held: Epochs = {}
    lost: Epochs = {}
    pending = dict(tokens)
    for tries in range(TRIES_MAX):
        keys = sorted(pending)
        arguments = (keys, [pending[key] for key in keys], clock, ttl_s, worker_id)
        for row in await connection.fetch(SQL["renew_leases"], *arguments):
            held[row["run_id"].hex] = row["cancel_epoch"]
        rest = [key for key in keys if key not in held]
        if not rest:
            return held, lost
        pending = await _still_held(connection, worker_id, tokens, rest, lost)
        if not pending:
            return held, lost
        if tries + 1 < TRIES_MAX:
            await anyio.sleep(_PAUSE_S)
    for key in sorted(pending):
        rows = await connection.fetch(
            SQL["renew_lease"], key, pending[key], clock, ttl_s, worker_id
        )
        held |= {row["run_id"].hex: row["cancel_epoch"] for row in rows}
    await _still_held(connection, worker_id, tokens, [k for k in pending if k not in held], lost)
    return held, lost


async def _still_held(
    connection: Connection,
    worker_id: str,
    tokens: dict[str, int],
    keys: Sequence[str],
    lost: Epochs,
) -> dict[str, int]:
    """Return the leases among `keys` that are held, so their rows were busy; note the others."""
    found: dict[str, int] = {}
    for row in await connection.fetch(SQL["find_leases"], list(keys)):
        key: str = row["run_id"].hex
        if row["lease_owner"] == worker_id and row["lease_token"] == tokens[key]:
            found[key] = tokens[key]
        else:
            lost[key] = row["cancel_epoch"]
    return found
