"""Benchmarks: run them from the root of the repository, e.g. ``python -m benchmarks.attention_forward run``."""
