"""Retention's gradients by chunks of the sequence on Hopper's WGMMA and TMA."""
