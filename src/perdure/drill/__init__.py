"""Recovery drills: faults on purpose, on an operator's own installation (R-19.6)."""
