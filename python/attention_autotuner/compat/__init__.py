"""The functions of other packages, under their names and with their arguments: ``flash_attn``, ``sdpa`` and ``fla``.

They call the public functions, and refuse by name whatever those do not compute.
"""
