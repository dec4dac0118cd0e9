"""``matmul``: its argument checks, launch plans, ``torch.library`` op and derivatives."""
