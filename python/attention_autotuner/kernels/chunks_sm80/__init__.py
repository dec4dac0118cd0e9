"""chunks_sm80."""
