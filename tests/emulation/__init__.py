"""An emulation of kernels of family sm90 on the CPU; README.md says what it checks and how to use it."""
