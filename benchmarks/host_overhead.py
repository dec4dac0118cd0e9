"""Host time of a warm call: what our functions cost the CPU, beside torch's own SDPA.

The shape is so small that the GPU always waits for the host, so wall time over many calls is host time, launch
included. Calls of all kinds are interleaved in random order, round after round; the figure is the median round.

    python -m benchmarks.host_overhead --output benchmarks/results/<gpu>/host_overhead.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_autotuner import flash_attn_func, retention_func, retnet_attn_func, settings
from attention_autotuner.api.attention.torch_op import FORWARD_OP
from attention_autotuner.arch import detect
from attention_autotuner.core.problem import of_shape
from attention_autotuner.serving import dispatch
from attention_autotuner.tuning.environment import collect
from benchmarks.results import write

SHAPE = (1, 2, 64, 64)
"""[batch, heads, seqlen, dim]: a few microseconds of GPU time."""
CALLS = 200
"""Calls a round: fewer than a stream's queue holds, so that none waits for a place in it."""
BARS_US = {"call": 15.0, "call with grad": 35.0, "lookup": 3.0}


def make_calls() -> dict[str, Callable[[], object]]:
    """Everything that is timed, by name."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(SHAPE, dtype=torch.float16, device="cuda") for _ in range(3))
    qg, kg, vg = (x.clone().requires_grad_() for x in (q, k, v))
    arguments = (None, False, False, "", False, False)
    batch, heads, seqlen, dim = SHAPE
    problem = of_shape((batch, heads, seqlen, dim, dim))
    policy = detect()
    mask = torch.rand(heads, seqlen, seqlen, dtype=torch.float16, device="cuda")
    of_pairs, sinks = mask > 0.1, torch.zeros(heads, device="cuda")
    window: dict[str, Any] = {"causal": True, "window_size": (15, -1)}
    q_one, k_one, v_one = (x[:, :, :1].contiguous() for x in (q, k, v))
    state = torch.zeros(batch, heads, dim, dim, device="cuda")
    gamma = [1 - 2.0 ** (-5 - head) for head in range(heads)]
    return {
        "call": lambda: flash_attn_func(q, k, v),
        "call with LSE": lambda: flash_attn_func(q, k, v, return_lse=True),
        "call with grad": lambda: flash_attn_func(qg, kg, vg),
        "call in a window": lambda: flash_attn_func(q, k, v, **window),
        "call in a window with sinks": lambda: flash_attn_func(q, k, v, sinks=sinks, **window),
        "call with a mask": lambda: flash_attn_func(q, k, v, attn_mask=of_pairs),
        "call in a window with grad": lambda: flash_attn_func(qg, kg, vg, **window),
        "call through the dispatcher": lambda: FORWARD_OP(q, k, v, *arguments),
        "call through the dispatcher with grad": lambda: FORWARD_OP(qg, kg, vg, *arguments),
        "lookup": lambda: dispatch.lookup(problem, policy),
        "retnet": lambda: retnet_attn_func(q, k, v, mask),
        "retnet with grad": lambda: retnet_attn_func(qg, kg, vg, mask),
        "retention": lambda: retention_func(q, k, v, None, output_final_state=False),
        "retention with grad": lambda: retention_func(qg, kg, vg, None, output_final_state=False),
        "retention, one token": lambda: retention_func(
            q_one, k_one, v_one, None, initial_state=state
        ),
        "retention, one token, state in place": lambda: retention_func(
            q_one, k_one, v_one, None, form="recurrent", initial_state=state, inplace_state=True
        ),
        "retention, one token, own gamma": lambda: retention_func(
            q_one, k_one, v_one, gamma, initial_state=state
        ),
        "SDPA": lambda: scaled_dot_product_attention(q, k, v),
        "SDPA with grad": lambda: scaled_dot_product_attention(qg, kg, vg),
    }


def time_us(call: Callable[[], object]) -> float:
    """Host time of one call, microseconds, over :data:`CALLS` calls on an idle GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(rounds: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Median and quartiles of every call, microseconds."""
    calls = make_calls()
    order = list(calls)
    shuffle = random.Random(seed).shuffle
    for call in calls.values():
        time_us(call)  # builds, loads, plans; outside the figures
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(time_us(calls[name]))
    figures = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        figures[name] = {"median_us": median, "quartile_low_us": low, "quartile_high_us": high}
    return figures


def main() -> int:
    """Measure, print, write; answers 1 when a bar is missed and 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds (default 60)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("host_overhead: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    with settings.override(strict_kernels=True):
        figures = measure(options.rounds)
    missed = [name for name, bar in BARS_US.items() if figures[name]["median_us"] > bar]
    for name, figure in figures.items():
        bar = f"  bar {BARS_US[name]:g}" if name in BARS_US else ""
        spread = f"{figure['quartile_low_us']:.2f} .. {figure['quartile_high_us']:.2f}"
        print(f"{name:<40}{figure['median_us']:8.2f} us  ({spread}){bar}")
    print("missed: " + ", ".join(missed) if missed else "every bar is met")
    if options.output is not None:
        report: dict[str, Any] = {
            "benchmark": "host_overhead",
            "shape": SHAPE,
            "dtype": "fp16",
            "calls_per_round": CALLS,
            "rounds": options.rounds,
            "environment": collect(torch.cuda.current_device()).to_json(),
            "bars_us": BARS_US,
            "figures": figures,
        }
        write(options.output, report)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
