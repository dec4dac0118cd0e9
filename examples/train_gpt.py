"""Train a small GPT twice, with this package's attention and with PyTorch's, and compare.

    python -m examples.train_gpt --steps 300 --out results
    python -m examples.train_gpt --compile --steps 300
    python -m examples.train_gpt --device cpu --steps 5 --layers 2 --dim 64 --seqlen 64 --batch 2

Both models start from one seed and see the same bytes of Python's standard library. Two more, with PyTorch's attention
in other roundings, measure the noise that the loss curves are compared with. Exits with 0 when the curves agree within
it, 1 when they do not, 2 when this machine or these sizes cannot be used.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # a first line before the seconds that torch takes
    print("train_gpt: loading PyTorch", file=sys.stderr, flush=True)

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .gpt.agreement import compare
from .gpt.attentions import Attention, autotuned, sdpa, sdpa_fp32, sdpa_other
from .gpt.model import GPTConfig
from .gpt.training import TrainingConfig, train
from .shared.script import Session, parser_of, run_script

OURS, BASELINE, AGAIN = "flash_attn_func", "SDPA", "flash_attn_func, again"
REFERENCES: Mapping[str, Attention] = {
    BASELINE: sdpa,
    "SDPA, other backend": sdpa_other,
    "SDPA in fp32": sdpa_fp32,
}
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    sizes = GPTConfig()
    parser = parser_of(
        "train_gpt",
        __doc__,
        steps=(300, "of training"),
        batch=(16, "sequences a step"),
        seqlen=(sizes.seqlen, "bytes a sequence"),
        layers=(sizes.layers, "blocks of the model"),
        dim=(sizes.dim, "width of the model; the feed-forward is 2.75 times as wide"),
        heads=(sizes.heads_q, "query heads"),
        heads_kv=(sizes.heads_kv, "key and value heads"),
    )
    option = parser.add_argument
    option("--learning-rate", type=float, default=TrainingConfig.learning_rate)
    words = "run the models through torch.compile, in this mode"
    option("--compile", nargs="?", const="default", choices=COMPILE_MODES, help=words)
    words = "deterministic algorithms only, and a second run of ours that must give the same bits"
    option("--deterministic", action="store_true", help=words)
    return parser.parse_args(arguments)


def train_all(options: argparse.Namespace) -> dict[str, Any]:
    """Train everything and compare; returns the report that is printed and written.

    Raises:
        ValueError: the sizes do not fit each other, or there is no such device.
    """
    sizes = GPTConfig(
        **{name: getattr(options, name) for name in ("layers", "dim", "heads_kv", "seqlen")},
        heads_q=options.heads,
        hidden=options.dim * 11 // 4,
    )
    rate, seed = options.learning_rate, options.seed
    config = TrainingConfig(learning_rate=rate, seed=seed, compile_mode=options.compile)
    session = Session("train_gpt", options)
    attentions = {OURS: autotuned, **REFERENCES}
    if options.deterministic:
        attentions[AGAIN] = autotuned
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or options.deterministic)
    try:
        runs = train(attentions, sizes, config, session)
    finally:
        torch.use_deterministic_algorithms(before)
    losses = {name: run["losses"] for name, run in runs.items()}
    agreement = compare(losses[OURS], [losses[name] for name in REFERENCES])
    same_bits = losses[AGAIN] == losses[OURS] if options.deterministic else None
    return session.report(
        sizes,
        config,
        deterministic=options.deterministic,
        runs=runs,
        agreement={**asdict(agreement), "ok": agreement.ok},
        same_bits=same_bits,
        ok=agreement.ok and same_bits is not False,
    )


def print_report(report: Mapping[str, Any]) -> None:
    """Print curves, figures and their agreement."""
    runs, agreement = report["runs"], report["agreement"]
    ours, baseline = runs[OURS], runs[BASELINE]
    print(f"      steps  {OURS}      SDPA  difference     noise  (mean losses, rms; nats a byte)")
    for window in agreement["windows"]:
        first, last = window["first"], window["last"]
        means = [statistics.fmean(run["losses"][first - 1 : last]) for run in (ours, baseline)]
        figures = f"{window['difference']:>10.5f}  {window['noise']:>8.5f}"
        print(f"{first:>5}-{last:<5}  {means[0]:>15.4f}  {means[1]:>8.4f}  {figures}")
    print(f"\n{'':<24}  step ms       quartiles  tokens/s  peak MiB  held out")
    for name, run in runs.items():
        quartiles = "{:.2f} .. {:.2f}".format(*run["step_ms_quartiles"])
        peak = "-" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**20:.0f}"
        figures = f"{run['tokens_per_second']:>10.0f}{peak:>10}{run['held_out_loss']:>10.4f}"
        print(f"{name:<24}{run['step_ms']:>9.2f}{quartiles:>16}{figures}")
    print(f"\nA step takes {ours['step_ms'] / baseline['step_ms']:.3f} times as long as with SDPA.")
    mean, worst = agreement["mean_ratio"], agreement["worst_ratio"]
    print(f"Difference over noise: {mean:.2f} on average, {worst:.2f} at worst.")
    if report["same_bits"] is not None:
        print(f"Two runs give the same bits: {'yes' if report['same_bits'] else 'NO'}.")
    print(f"Loss curves agree within noise: {agreement['reason'] or 'yes'}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status that the module promises."""
    return run_script(parse(arguments), train_all, print_report)


if __name__ == "__main__":
    sys.exit(main())
