"""Sums of rows in Triton, tuned here and by Triton's own autotune.

    python -m examples.autotune.reduction

Exits with 0 where the pick is Triton's or as fast, 1 where it is slower, 2 without a GPU or Triton. One
configuration sums in float16, which the reference shows to be wrong.
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
    sys.exit(lacks_triton("reduction", error))

ROWS, COLUMNS = 8192, 16384
BLOCKS = (1024, 512, 2048, 4096, 8192)
CONFIGS = [{"block": b, "warps": w, "dtype": "float32"} for b in BLOCKS for w in (4, 8, 16)]


@triton.jit  # type: ignore[untyped-decorator]  # optional, and without types
def _sum_kernel(x, out, columns, BLOCK: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=DTYPE)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(DTYPE)
    tl.store(out + row, tl.sum(total, axis=0).to(tl.float32))


def exact_sums(x: torch.Tensor) -> torch.Tensor:
    """The sums in fp64."""
    return x.double().sum(dim=1)


@autotune(
    [*CONFIGS, {"block": 1024, "warps": 4, "dtype": "float16"}],
    reference=exact_sums,
    tolerance=1e-4,
)
def row_sums(x: torch.Tensor, *, block: int, warps: int, dtype: str) -> torch.Tensor:
    """The sums of the rows of a contiguous matrix, fp32."""
    out = torch.empty(x.shape[0], device=x.device)
    kind = getattr(tl, dtype)
    _sum_kernel[x.shape[0],](x, out, x.shape[1], BLOCK=block, DTYPE=kind, num_warps=warps)
    return out


def matrix(device: str, rows: int = ROWS, columns: int = COLUMNS) -> tuple[torch.Tensor]:
    """A random matrix in fp16, with a mean that is not 0."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, columns, device=device, dtype=torch.float16, generator=generator)
    return (x + 1,)


def picked_by_triton(x: torch.Tensor) -> Mapping[str, Any]:
    """The configuration that Triton's autotune takes."""
    configs = [triton.Config({"BLOCK": c["block"]}, num_warps=c["warps"]) for c in CONFIGS]
    tuned = triton.autotune(configs, key=["columns"])(_sum_kernel)
    out = torch.empty(x.shape[0], device=x.device)
    tuned[x.shape[0],](x, out, x.shape[1], DTYPE=tl.float32)
    best = tuned.best_config
    return {"block": best.kwargs["BLOCK"], "warps": best.num_warps, "dtype": "float32"}


if __name__ == "__main__":
    from examples.autotune import reduction as here  # importable by a worker, unlike a main program

    sys.exit(run_comparison("reduction", here.row_sums, matrix, picked_by_triton))
