"""scores_forward_sm90."""
