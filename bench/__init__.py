"""Benchmarks: trace replay, policy simulation, bandwidth against the machine's own limits, reports."""
