"""Functions of other people's kernels, tuned by ``attention_autotuner.autotune``."""
