"""A Triton vector addition, tuned here and by Triton's own autotune.

    python -m examples.autotune.vector_add

Exits with 0 where the pick is Triton's or as fast, 1 where it is slower, 2 without a GPU or Triton. One
configuration adds in float16, which the reference shows to be wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from attention_autotuner import autotune

from .comparison import lacks_triton, run_comparison

try:
    import triton
    import triton.language as tl
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(lacks_triton("vector_add", error))

SIZE = 1 << 25
BLOCKS = (1024, 256, 512, 2048, 4096, 8192)
CONFIGS = [{"block": b, "warps": w, "half": False} for b in BLOCKS for w in (4, 2, 8)]


@triton.jit  # type: ignore[untyped-decorator]  # optional, and without types
def _add_kernel(x, y, out, n, BLOCK: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    a, b = tl.load(x + at, mask=mask), tl.load(y + at, mask=mask)
    if HALF:
        a, b = a.to(tl.float16), b.to(tl.float16)
    tl.store(out + at, (a + b).to(tl.float32), mask=mask)


@autotune([*CONFIGS, {"block": 1024, "warps": 4, "half": True}], reference=torch.add)
def add(x: torch.Tensor, y: torch.Tensor, *, block: int, warps: int, half: bool) -> torch.Tensor:
    """The sum of two fp32 vectors of one length."""
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), block),)
    _add_kernel[grid](x, y, out, x.numel(), BLOCK=block, HALF=half, num_warps=warps)
    return out


def vectors(device: str, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random vectors."""
    generator = torch.Generator(device).manual_seed(0)
    x, y = torch.randn(2, size, device=device, generator=generator)
    return x, y


def picked_by_triton(x: torch.Tensor, y: torch.Tensor) -> Mapping[str, Any]:
    """The configuration that Triton's autotune takes."""
    configs = [triton.Config({"BLOCK": c["block"]}, num_warps=c["warps"]) for c in CONFIGS]
    tuned = triton.autotune(configs, key=["n"])(_add_kernel)
    tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](
        x, y, torch.empty_like(x), x.numel(), HALF=False
    )
    best = tuned.best_config
    return {"block": best.kwargs["BLOCK"], "warps": best.num_warps, "half": False}


if __name__ == "__main__":
    from examples.autotune import (
        vector_add as here,
    )  # importable by a worker, unlike a main program

    sys.exit(run_comparison("vector_add", here.add, vectors, picked_by_triton))
