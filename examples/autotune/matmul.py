"""A Triton matrix product, tuned here and by Triton's own autotune.

    python -m examples.autotune.matmul

Exits with 0 where the pick is Triton's or as fast, 1 where it is slower, 2 without a GPU or Triton. One
configuration adds up in float16, which the reference shows to be wrong.
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
    sys.exit(lacks_triton("matmul", error))

SIZE = 4096
TILES = (
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 32, 4, 4),
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
)
NAMES = ("block_m", "block_n", "block_k", "warps", "stages")
CONFIGS = [dict(zip(NAMES, tile, strict=True)) | {"dtype": "float32"} for tile in TILES]
GROUP_M = 8  # tiles of rows that share what they read of b in L2


@triton.jit  # type: ignore[untyped-decorator]  # optional, and without types
def _matmul_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    a,  # noqa: ANN001
    b,  # noqa: ANN001
    c,  # noqa: ANN001
    m,  # noqa: ANN001
    n,  # noqa: ANN001
    k,  # noqa: ANN001
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
):
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    index, per_group = tl.program_id(0), GROUP * tiles_n
    first = index // per_group * GROUP
    rows_here = min(tiles_m - first, GROUP)
    tile_m = first + index % per_group % rows_here
    tile_n = index % per_group // rows_here
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=DTYPE)
    for start in range(0, k, BLOCK_K):
        at = start + inner
        a_tile = tl.load(
            a + rows[:, None] * k + at[None, :],
            mask=(rows < m)[:, None] & (at < k)[None, :],
            other=0.0,
        )
        b_tile = tl.load(
            b + at[:, None] * n + columns[None, :], mask=(at < k)[:, None] & (columns < n)[None, :], other=0.0
        )  # fmt: skip
        total = tl.dot(a_tile, b_tile, total, out_dtype=DTYPE)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.float16), mask=mask)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in fp32."""
    return a.float() @ b.float()


@autotune([*CONFIGS, CONFIGS[0] | {"dtype": "float16"}], reference=exact_product)
def matmul(
    a: torch.Tensor, b: torch.Tensor, *, block_m: int, block_n: int, block_k: int, warps: int, stages: int, dtype: str
) -> torch.Tensor:  # fmt: skip
    """The product of two contiguous fp16 matrices ``[m, k]`` and ``[k, n]``, fp16."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float16, device=a.device)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": GROUP_M}
    _matmul_kernel[grid](
        a, b, c, m, n, k, **blocks, DTYPE=getattr(tl, dtype), num_warps=warps, num_stages=stages
    )
    return c


def matrices(device: str, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random square matrices; one has a mean that is not 0, so that sums are large."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, size, size, device=device, dtype=torch.float16, generator=generator)
    return a + 1, b + 1


def picked_by_triton(a: torch.Tensor, b: torch.Tensor) -> Mapping[str, Any]:
    """The configuration that Triton's autotune takes."""
    configs = [
        triton.Config(
            {"BLOCK_M": c["block_m"], "BLOCK_N": c["block_n"], "BLOCK_K": c["block_k"]},
            num_warps=c["warps"],
            num_stages=c["stages"],
        )
        for c in CONFIGS
    ]
    tuned = triton.autotune(configs, key=["m", "n", "k"])(_matmul_kernel)
    (m, k), n = a.shape, b.shape[1]
    tuned[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)](
        a, b, torch.empty_like(a), m, n, k, GROUP=GROUP_M, DTYPE=tl.float32
    )
    best = tuned.best_config
    blocks = {name: best.kwargs[name.upper()] for name in NAMES[:3]}
    return {**blocks, "warps": best.num_warps, "stages": best.num_stages, "dtype": "float32"}


if __name__ == "__main__":
    from examples.autotune import matmul as here  # importable by a worker, unlike a main program

    sys.exit(run_comparison("matmul", here.matmul, matrices, picked_by_triton))
