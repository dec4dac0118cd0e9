"""The product of two matrices on Hopper's WGMMA and TMA."""
