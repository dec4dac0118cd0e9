"""Common ground of the examples: text to learn, the optimizer and its schedule, command lines and progress."""
