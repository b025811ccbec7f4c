"""Lossy wake-ups between processes: the port and its adapters. The store stays the truth."""
