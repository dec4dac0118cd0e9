"""Modules of ``examples.train_retnet``: retention in a model, its training, and decoding from carried states."""
