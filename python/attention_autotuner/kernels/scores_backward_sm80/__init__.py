"""scores_backward_sm80."""
