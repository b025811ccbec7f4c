"""Perdure: a durable runtime for agents."""
