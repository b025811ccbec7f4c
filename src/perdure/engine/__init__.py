"""Advances runs durably: claims, attempts, effects, commits, resumption."""
