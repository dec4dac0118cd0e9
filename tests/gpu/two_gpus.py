"""Searches shared by real GPUs, by hand: ``torchrun --nproc-per-node 2 -m tests.gpu.two_gpus``.

Tunes eight problems with builds warm, by each rank alone and by all together, and compares picks and times; then a
function whose ranks communicate. Exits with 0 where all ranks agree and together are at least 1.7 times as fast.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from attention_autotuner import settings, tune
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.records import RecordStore
from examples.autotune.two_ranks import matmul_all_reduce

PROBLEMS = [
    Problem(batch=2, heads_q=16, heads_kv=16, seqlen_q=seqlen, seqlen_k=seqlen, causal=causal)
    for seqlen in (1024, 2048, 4096, 8192)
    for causal in (False, True)
]
SPEEDUP = 1.7  # of two GPUs over one


def main() -> int:
    """Run as one of the ranks."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    for problem in PROBLEMS:  # builds, and no time counts yet
        tune(problem, group=group, budget_seconds=2.0, confirm=False)
    with tempfile.TemporaryDirectory() as folder:
        seconds, picks = {}, {}
        for name, of in (("alone", None), ("together", group)):
            dist.barrier()
            began = time.monotonic()
            records = RecordStore(Path(folder, name, str(rank)))
            picks[name] = [
                tune(problem, group=of, records=records, confirm=False).pick.name
                for problem in PROBLEMS
            ]
            seconds[name] = time.monotonic() - began
        with settings.override(cache_dir=Path(folder)):
            a, b = torch.randn(2, 4096, 4096, device="cuda", dtype=torch.bfloat16)
            pick = dict(matmul_all_reduce.tune(a, b, group=group).pick)
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (picks["together"], pick))
    agreed, ratio = (
        all(of == gathered[0] for of in gathered),
        seconds["alone"] / seconds["together"],
    )
    if rank == 0:
        print(
            f"agreed: {agreed}; alone {seconds['alone']:.1f} s, together {seconds['together']:.1f} s: {ratio:.2f}x"
        )
        print(f"two_ranks: {pick}")
        for problem, alone, together in zip(
            PROBLEMS, picks["alone"], picks["together"], strict=True
        ):
            print(f"{problem.describe()}: alone {alone}, together {together}")
    dist.destroy_process_group()
    return 0 if agreed and ratio >= SPEEDUP else 1


if __name__ == "__main__":
    sys.exit(main())
