"""scores_forward_sm80."""
