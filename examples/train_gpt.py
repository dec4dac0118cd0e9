"""Train a small GPT twice, with this package's attention and with PyTorch's, and compare.

    python -m examples.train_gpt --steps 300 --out results
    python -m examples.train_gpt --compile --steps 300
    python -m examples.train_gpt --compile --references flash cudnn --seeds 0 1 2
    python -m examples.train_gpt --device cpu --steps 5 --layers 2 --dim 64 --seqlen 64 --batch 2

Both models start from one seed and see the same bytes of Python's standard library. Two more, with PyTorch's attention
in other roundings, measure the noise that the loss curves are compared with; --references chooses others, which
our losses and steps are then held to by bars. Exits with 0 when the curves agree within the noise and no bar is missed,
1 when not, 2 when this machine or these sizes cannot be used.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # a first line before the seconds that torch takes
    print("train_gpt: loading PyTorch", file=sys.stderr, flush=True)

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from .gpt.agreement import compare
from .gpt.attentions import (
    Attention,
    autotuned,
    sdpa,
    sdpa_cudnn,
    sdpa_flash,
    sdpa_fp32,
    sdpa_other,
)
from .gpt.bars import bars_of
from .gpt.model import GPTConfig
from .gpt.training import TrainingConfig, train
from .shared.script import Session, parser_of, run_script, say

OURS, AGAIN = "flash_attn_func", "flash_attn_func, again"
REFERENCES: Mapping[str, tuple[str, Attention]] = {
    "default": ("SDPA", sdpa),
    "other": ("SDPA, other backend", sdpa_other),
    "fp32": ("SDPA in fp32", sdpa_fp32),
    "flash": ("SDPA, flash", sdpa_flash),
    "cudnn": ("SDPA, cuDNN", sdpa_cudnn),
}
"""Word of the command line -> title and attention."""
USUAL = ("default", "other", "fp32")
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
    words = "at least two, the one to compare with first; then bars are measured: "
    words += (
        "how far we are from the first, over their own distance, and our steps over the fastest's"
    )
    option("--references", nargs="+", choices=list(REFERENCES), help=words)
    words = "several in place of --seed, one after the other; compiled graphs serve all"
    option("--seeds", nargs="+", type=int, help=words)
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
    chosen = tuple(dict.fromkeys(options.references or USUAL))
    if len(chosen) < 2:
        raise ValueError(f"at least two references are needed, got {chosen[0]} alone")
    seeds = list(dict.fromkeys(options.seeds or [options.seed]))
    config = TrainingConfig(
        learning_rate=options.learning_rate, seed=seeds[0], compile_mode=options.compile
    )
    trainings = []
    for seed in seeds:
        seeded = argparse.Namespace(**{**vars(options), "seed": seed})
        session = Session("train_gpt", seeded)
        training = train_seed(seeded, chosen, sizes, replace(config, seed=seed), session)
        trainings.append(training)
        times = ", ".join(f"{name} {run['step_ms']:.2f}" for name, run in training["runs"].items())
        say(f"seed {seed}: ms a step: {times}")
    titles = [REFERENCES[name][0] for name in chosen]
    bars = None
    if options.references:
        bars = bars_of({training["seed"]: training["runs"] for training in trainings}, OURS, titles)
    met = bars is None or (bars["all"]["gap_ok"] and bars["all"]["time_ok"])
    trained = trainings[0] if len(seeds) == 1 else {"seed": seeds, "trainings": trainings}
    return session.report(
        sizes,
        config,
        deterministic=options.deterministic,
        references=titles,
        bars=bars,
        **trained | {"ok": met and all(training["ok"] for training in trainings)},
    )


def train_seed(
    options: argparse.Namespace,
    chosen: Sequence[str],
    sizes: GPTConfig,
    config: TrainingConfig,
    session: Session,
) -> dict[str, Any]:
    """Train everything from one seed and compare.

    Returns:
        ``seed``, ``runs``, ``agreement``, ``same_bits`` and ``ok``.
    """
    references = dict(REFERENCES[name] for name in chosen)
    attentions = {OURS: autotuned, **references}
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
    agreement = compare(losses[OURS], [losses[title] for title in references])
    same_bits = losses[AGAIN] == losses[OURS] if options.deterministic else None
    return {
        "seed": config.seed,
        "runs": runs,
        "agreement": {**asdict(agreement), "ok": agreement.ok},
        "same_bits": same_bits,
        "ok": agreement.ok and same_bits is not False,
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Print curves, figures and their agreement, for each seed, and the bars."""
    trainings = report.get("trainings", [report])
    for training in trainings:
        if len(trainings) > 1:
            print(f"\nSeed {training['seed']}\n")
        print_training(training, report["references"][0])
    if report["bars"] is not None:
        print_bars(report["bars"], report["references"])


def print_training(training: Mapping[str, Any], first: str) -> None:
    """Print what one seed gave.

    Args:
        training: from :func:`train_seed`.
        first: the reference that is compared with.
    """
    runs, agreement = training["runs"], training["agreement"]
    ours, baseline = runs[OURS], runs[first]
    width = max(8, len(first))
    columns = f"{first:>{width}}  difference     noise  (mean losses, rms; nats a byte)"
    print(f"      steps  {OURS}  {columns}")
    for window in agreement["windows"]:
        start, last = window["first"], window["last"]
        means = [statistics.fmean(run["losses"][start - 1 : last]) for run in (ours, baseline)]
        figures = f"{window['difference']:>10.5f}  {window['noise']:>8.5f}"
        print(f"{start:>5}-{last:<5}  {means[0]:>15.4f}  {means[1]:>{width}.4f}  {figures}")
    print(f"\n{'':<24}  step ms           quartiles  tokens/s  peak MiB  held out")
    for name, run in runs.items():
        quartiles = "{:.2f} .. {:.2f}".format(*run["step_ms_quartiles"])
        peak = "-" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**20:.0f}"
        figures = f"{run['tokens_per_second']:>8.0f}  {peak:>8}  {run['held_out_loss']:>8.4f}"
        print(f"{name:<24}  {run['step_ms']:>7.2f}  {quartiles:>18}  {figures}")
    print(
        f"\nA step takes {ours['step_ms'] / baseline['step_ms']:.3f} times as long as with {first}."
    )
    mean, worst = agreement["mean_ratio"], agreement["worst_ratio"]
    print(f"Difference over noise: {mean:.2f} on average, {worst:.2f} at worst.")
    if training["same_bits"] is not None:
        print(f"Two runs give the same bits: {'yes' if training['same_bits'] else 'NO'}.")
    print(f"Loss curves agree within noise: {agreement['reason'] or 'yes'}.")


def print_bars(bars: Mapping[str, Any], references: Sequence[str]) -> None:
    """Print the figures that have bars, of each seed and of all."""
    names = (OURS, *references)
    widths = [max(9, len(name)) for name in names]
    columns = [f"{name:>{width}}" for name, width in zip(names, widths, strict=True)]
    print(f"\n seed   loss gap  at worst  {'  '.join(columns)}  over the fastest  (steps in ms)")
    for figures in (*bars["seeds"], {"seed": "all", **bars["all"]}):
        times = [figures["step_ms"][name] for name in names]
        columns = [f"{time:>{width}.3f}" for time, width in zip(times, widths, strict=True)]
        gaps = f"{figures['gap']:>9.3f}  {figures['worst_gap']:>8.3f}"
        print(f"{figures['seed']:>5}  {gaps}  {'  '.join(columns)}  {figures['time']:>16.4f}")
    whole = bars["all"]
    met = {True: "met", False: "MISSED"}
    noise = f"{whole['small_windows']} windows had one below {bars['least_noise']:g} nats a byte"
    print(f"\nLoss gap: from {references[0]}, over the references' own, in windows; {noise}.")
    print(f"Bar of {bars['gap_bar']:g} for the loss gap: {met[whole['gap_ok']]}.")
    print(
        f"Bar of {bars['time_bar']:g} for steps, over {whole['fastest']}: {met[whole['time_ok']]}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status that the module promises."""
    return run_script(parse(arguments), train_all, print_report)


if __name__ == "__main__":
    sys.exit(main())
