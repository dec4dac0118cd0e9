"""scores_backward_sm90."""
