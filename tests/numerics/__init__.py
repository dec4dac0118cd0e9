"""Numerical verification of kernels: a fixed list of shapes, a sample of candidates, and the check of their outputs."""
