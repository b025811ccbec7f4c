"""Runs and tends the system: databases, drills, maintenance."""
