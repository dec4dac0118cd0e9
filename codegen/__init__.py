"""From a decision to a binary: problem, candidate, rendering, toolchain, build and store."""
