"""The deterministic simulation: the whole engine in one process, on a clock that never waits.

`simulate` plays one seed and tells what it found. Everything that could differ from one play to
the next is owned by it: time, the order in which tasks run, ids, chance, the network between
processes and database, and the faults. So the same seed gives the same trace, whose digest is
part of what is told.
"""

from perdure.testing.sim.play import Outcome, simulate
from perdure.testing.sim.script import Script, draw_script
from perdure.testing.sim.shrink import shrink

__all__ = ["Outcome", "Script", "draw_script", "shrink", "simulate"]
