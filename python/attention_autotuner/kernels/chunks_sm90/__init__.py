"""chunks_sm90."""
