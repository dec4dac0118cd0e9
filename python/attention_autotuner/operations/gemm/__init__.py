"""The product of two matrices: its problems, params, test inputs and reference."""
