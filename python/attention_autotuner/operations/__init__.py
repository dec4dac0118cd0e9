"""The operations: for each what its problems mean, the reference, test inputs, and params of a launch."""
