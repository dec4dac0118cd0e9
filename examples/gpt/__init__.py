"""Modules of ``examples.train_gpt``: the model, its training, the comparison of loss curves, and their chart."""
