"""The forward through a matrix of scores, on Hopper's WGMMA and TMA."""
