"""Retention by chunks of the sequence, forward and backward, on mma.sync and cp.async."""
