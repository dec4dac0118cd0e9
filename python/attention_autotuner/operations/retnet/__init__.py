"""Retention under a mask or a decay with a normaliser: its problems, params, test inputs and reference."""
