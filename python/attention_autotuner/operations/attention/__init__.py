"""Softmax attention: its problems, params, test inputs and reference."""
