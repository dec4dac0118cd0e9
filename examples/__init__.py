"""Programs to copy from: training with the attention of this package."""
