"""Gradients through a matrix of scores, on mma.sync and cp.async."""
