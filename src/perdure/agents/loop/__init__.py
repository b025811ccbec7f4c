"""Loop agents: planners that decide step by step from a view of the run's log."""
