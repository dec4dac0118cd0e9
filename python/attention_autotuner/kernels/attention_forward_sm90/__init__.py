"""Attention forward on Hopper: WGMMA and TMA, with a softmax that hides behind them."""
