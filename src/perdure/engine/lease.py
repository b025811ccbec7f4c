"""A worker's right to advance a run, as the worker knows it.

It trusts the lease for `ttl - margin` from before the renewal was sent, by its own monotonic
clock; the database alone decides who holds the run.
"""

from enum import StrEnum

import anyio


class LeaseGone(Exception):
    """The worker can no longer prove that it holds the run: an ordinary ending."""


class Stop(StrEnum):
    """Why an attempt is stopped from outside."""

    LEASE_LOST = "lease_lost"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    DRAIN = "drain"


class Lease:
    """One held run: its token, how long it is trusted, and the scope that a stop cancels."""

    def __init__(self, run_id: str, token: int, *, valid_until: float, epoch: int) -> None:
        self.run_id = run_id
        self.token = token
        self.valid_until = valid_until
        self.epoch = epoch
        self.suspected = False
        """The run may have killed its last worker: faults since its last step."""
        self.draining = False
        self.stopped: Stop | None = None
        self.scope = anyio.CancelScope()

    def is_valid(self, now: float) -> bool:
        """Tell whether the lease is still trusted at a monotonic time."""
        return self.stopped is not Stop.LEASE_LOST and now < self.valid_until

    def stop(self, why: Stop) -> None:
        """Cancel the attempt's scope; the first reason stays, but a lost lease beats all."""
        if self.stopped is None or why is Stop.LEASE_LOST:
            self.stopped = why
        self.scope.cancel()
