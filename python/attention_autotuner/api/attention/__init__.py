"""``flash_attn_func``: its argument checks, launch plans, ``torch.library`` ops and derivatives."""
