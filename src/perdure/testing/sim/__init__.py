"""The deterministic simulation: the whole engine in one process, on a clock that never waits.

`simulate` plays one seed and tells what it found, over the memory store or the SQLite one. Everything
that could differ from one play to the next is owned by it: time, the order in which tasks run, ids,
chance, the network between processes and database, and the faults. So the same seed gives the same
trace, whose digest is part of what is told.
"""

from perdure.testing.sim.draw import draw_script
from perdure.testing.sim.play import Outcome, simulate
from perdure.testing.sim.script import Script
from perdure.testing.sim.shrink import shrink
from perdure.testing.sim.stores import StoreKind

__all__ = ["Outcome", "Script", "StoreKind", "draw_script", "shrink", "simulate"]
