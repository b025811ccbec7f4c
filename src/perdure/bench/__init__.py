"""Measures throughput and latency of the runtime."""
