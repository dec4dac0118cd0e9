"""Everything that our kernels are compared with: one registry, from which every suite takes its baselines.

A new one is a class over :class:`.base.Baseline` in a file of this folder, and its place in :data:`BASELINES`.
"""

from __future__ import annotations

from .base import Baseline
from .compiled import Compiled, CompiledAutotuned, Eager, Flex, FlexFlash
from .copy import Copy
from .cublas import Cublas
from .fla import Fla
from .flash_attn import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention3Deterministic,
    FlashAttention4,
    FlashAttention4Deterministic,
)
from .plain import EqualLengths, Plain
from .sdpa import SdpaCudnn, SdpaEfficient, SdpaFlash

BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        SdpaFlash(),
        SdpaCudnn(),
        SdpaEfficient(),
        Flex(),
        FlexFlash(),
        Plain(),
        EqualLengths(),
        FlashAttention2(),
        FlashAttention3(),
        FlashAttention3Deterministic(),
        FlashAttention4(),
        FlashAttention4Deterministic(),
        Compiled(),
        CompiledAutotuned(),
        Eager(),
        Fla(),
        Copy(),
        Cublas(),
    )
}
"""Name -> baseline; the order is that of tables."""
