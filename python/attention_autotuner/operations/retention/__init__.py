"""Retention with decay that carries a state: its problems, params, test inputs and references."""
