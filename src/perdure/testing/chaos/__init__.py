"""Chaos with real processes: workers, servers, clients and databases that are killed, stopped,
cut off and restarted, while runs of every kind go on.

`perdure-chaos` runs campaigns. What a simulation cannot show is shown here: SQL and its locks,
threads, signals, sockets, and what a database does when it dies.
"""

from perdure.testing.chaos.campaign import Plan, run_campaign
from perdure.testing.chaos.report import Finding, Record

__all__ = ["Finding", "Plan", "Record", "run_campaign"]
