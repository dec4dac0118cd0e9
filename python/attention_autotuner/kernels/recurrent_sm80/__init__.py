"""Retention token by token, as decoding computes it."""
