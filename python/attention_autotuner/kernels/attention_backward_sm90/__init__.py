"""Attention's gradients on Hopper: WGMMA and TMA, with P and dS as operands from registers."""
