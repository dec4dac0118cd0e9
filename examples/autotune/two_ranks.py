"""A matrix product whose inner dimension is split among ranks, tuned by all of them together.

    torchrun --nproc-per-node 2 -m examples.autotune.two_ranks

Rows go in chunks: the sum over ranks of a chunk runs while the next chunk is multiplied. How many chunks are best hangs
on the links between the GPUs. Runs on CPUs as well, by gloo. Prints the pick; exits with 0 where the result is right.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from attention_autotuner import autotune

SIZE = {"cuda": 8192, "cpu": 512}


def summed_product(a: torch.Tensor, b: torch.Tensor, group: Any) -> torch.Tensor:
    """The product in one piece, added up over the ranks."""
    product = a @ b
    dist.all_reduce(product, group=group)
    return product


@autotune({"chunks": [1, 2, 4, 8]}, collective=True, reference=summed_product, tolerance=1e-2)
def matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, group: Any, *, chunks: int) -> torch.Tensor:
    """The sum over ranks of ``a @ b``, ``[m, n]``; each rank has its columns of a and rows of b."""
    product = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    pending = []
    for rows, out in zip(a.chunk(chunks), product.chunk(chunks), strict=True):
        torch.mm(rows, b, out=out)
        pending.append(dist.all_reduce(out, group=group, async_op=True))
    for work in pending:
        work.wait()
    return product


def main() -> int:
    """Tune and compare, as one of the ranks that torchrun starts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    group, rank, size = dist.group.WORLD, dist.get_rank(), SIZE[device]
    generator = torch.Generator(device).manual_seed(rank)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = torch.randn(
        2, size, size // dist.get_world_size(), device=device, dtype=dtype, generator=generator
    )
    arguments = (a, b.T.contiguous())
    result = matmul_all_reduce.tune(*arguments, group=group, verbose=True)
    product = matmul_all_reduce(*arguments, group=group)
    expected = summed_product(*arguments, group)
    right = bool((product - expected).abs().max() <= 1e-2 * expected.abs().max())
    if rank == 0:
        print(f"two_ranks: {dict(result.pick)}, {result.status}, right: {right}")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
