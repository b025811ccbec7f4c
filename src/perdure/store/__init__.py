"""Keeps runs and their histories: the port and its adapters."""
