"""Patterns of orchestration that are planners of their own (R-4.8)."""
