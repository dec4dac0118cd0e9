"""Tensors, comparisons and bindings that the operations share."""
