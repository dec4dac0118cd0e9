"""A kernel family for tests: ``naive_sm80`` as one Python folder, and one of the same name with its headers."""
