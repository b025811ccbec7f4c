"""Measures throughput, latency and growth of the runtime."""
