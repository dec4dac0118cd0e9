"""naive_sm80."""
