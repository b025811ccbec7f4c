"""Planners and models: the loops that decide what a run does next."""
