"""recurrent_sm80."""
