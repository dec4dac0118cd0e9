"""Train a small GPT twice, with this package's attention and with PyTorch's, and compare.

    python -m examples.train_gpt --steps 300 --out /tmp/train_gpt
    python -m examples.train_gpt --compile --steps 300
    python -m examples.train_gpt --device cpu --steps 5 --layers 2 --dim 64 --seqlen 64 --batch 2

Both models start from one seed and see the same bytes of Python's standard library. Two more, with PyTorch's attention
in other roundings, measure the noise that the loss curves are held against. Exits with 0 when the curves agree within
it, 1 when they do not, 2 when this machine or these sizes cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attention_autotuner.tuning.environment import collect

from .gpt.agreement import LEAST_NOISE, judge
from .gpt.attentions import Attention, autotuned, sdpa, sdpa_fp32, sdpa_other
from .gpt.chart import Panel, Series, draw
from .gpt.data import Batches, Corpus, read_corpus
from .gpt.model import GPTConfig
from .gpt.training import History, TrainingConfig, train

OURS, BASELINE, AGAIN = "flash_attn_func", "SDPA", "flash_attn_func, again"
REFERENCES: Mapping[str, Attention] = {
    BASELINE: sdpa,
    "SDPA, other backend": sdpa_other,
    "SDPA in fp32": sdpa_fp32,
}
HELD_OUT_BATCHES = 8
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    sizes, defaults = GPTConfig(), TrainingConfig()
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_gpt", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--seqlen", type=int, default=sizes.seqlen)
    parser.add_argument("--layers", type=int, default=sizes.layers)
    parser.add_argument("--dim", type=int, default=sizes.dim, help="width of the model")
    parser.add_argument("--heads", type=int, default=sizes.heads_q)
    parser.add_argument("--heads-kv", type=int, default=sizes.heads_kv)
    parser.add_argument("--hidden", type=int, help="feed-forward width; default: 2.75 times --dim")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of weights and batches")
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="default",
        choices=COMPILE_MODES,
        help="run the models through torch.compile, in this mode",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="deterministic algorithms only, and a second run of ours that must give the same bits",
    )
    parser.add_argument("--out", type=Path, help="folder for train_gpt.json and train_gpt.svg")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    return options


def sizes_of(options: argparse.Namespace) -> GPTConfig:
    """The model that the options name.

    Raises:
        ValueError: its sizes do not fit each other.
    """
    return GPTConfig(
        layers=options.layers,
        dim=options.dim,
        heads_q=options.heads,
        heads_kv=options.heads_kv,
        hidden=options.dim * 11 // 4 if options.hidden is None else options.hidden,
        seqlen=options.seqlen,
    )


def run(
    options: argparse.Namespace, sizes: GPTConfig, corpus: Corpus, device: torch.device
) -> dict[str, Any]:
    """Train everything and judge; answers the report that is printed and written."""
    config = TrainingConfig(
        learning_rate=options.learning_rate, seed=options.seed, compile_mode=options.compile
    )
    shape = {"batch": options.batch, "seqlen": sizes.seqlen, "device": str(device)}
    attentions = {OURS: autotuned, **REFERENCES}
    if options.deterministic:
        attentions[AGAIN] = autotuned
    histories = train(
        attentions,
        sizes,
        config,
        batches=Batches(corpus.train, count=options.steps, seed=options.seed, **shape),
        held_out=Batches(corpus.held_out, count=HELD_OUT_BATCHES, seed=0, **shape),
        device=device,
    )
    verdict = judge(histories[OURS].losses, [histories[name].losses for name in REFERENCES])
    same_bits = histories[AGAIN].losses == histories[OURS].losses if options.deterministic else None
    return {
        "example": "train_gpt",
        "device": str(device),
        "steps": options.steps,
        "batch": options.batch,
        "model": asdict(sizes),
        "training": asdict(config),
        "deterministic": options.deterministic,
        "corpus": describe_corpus(corpus),
        "environment": collect(device.index or 0).to_json(),
        "runs": {
            name: describe_run(history, options.batch * sizes.seqlen)
            for name, history in histories.items()
        },
        "agreement": {**asdict(verdict), "ok": verdict.ok},
        "same_bits": same_bits,
    }


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    """Which text it was."""
    return {
        "files": corpus.files,
        "train_bytes": len(corpus.train),
        "held_out_bytes": len(corpus.held_out),
        "digest": corpus.digest,
    }


def describe_run(history: History, tokens: int) -> dict[str, Any]:
    """Losses and figures of one model, for a report."""
    median = statistics.median(history.step_ms)
    spread = statistics.quantiles(history.step_ms, n=4) if len(history.step_ms) > 1 else None
    return {
        "losses": history.losses,
        "held_out_loss": history.held_out_loss,
        "first_seconds": history.first_seconds,
        "step_ms": median,
        "step_ms_quartiles": [spread[0], spread[2]] if spread else [median, median],
        "steps_timed": len(history.step_ms),
        "tokens_per_second": tokens / median * 1e3,
        "peak_bytes": history.peak_bytes,
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Curves, figures and verdict, for reading."""
    runs, agreement = report["runs"], report["agreement"]
    ours, baseline = runs[OURS], runs[BASELINE]
    print(f"{'steps':>11}  {OURS:>15}  {BASELINE:>8}  {'difference':>10}  {'noise':>8}")
    print(f"{'':>11}  {'mean loss':>15}  {'':>8}  {'rms':>10}  {'rms':>8}   nats a byte")
    for window in agreement["windows"]:
        first, last = window["first"], window["last"]
        means = [statistics.fmean(curve["losses"][first - 1 : last]) for curve in (ours, baseline)]
        print(
            f"{first:>5}-{last:<5}  {means[0]:>15.4f}  {means[1]:>8.4f}  "
            f"{window['difference']:>10.5f}  {window['noise']:>8.5f}"
        )
    print()
    print(
        f"{'':<24}{'step ms':>9}{'quartiles':>16}{'tokens/s':>11}{'peak MiB':>10}{'held out':>10}"
        f"{'first s':>9}"
    )
    for name, row in runs.items():
        low, high = row["step_ms_quartiles"]
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
        print(
            f"{name:<24}{row['step_ms']:>9.2f}{f'{low:.2f} .. {high:.2f}':>16}"
            f"{row['tokens_per_second']:>11.0f}{peak:>10}{row['held_out_loss']:>10.4f}"
            f"{row['first_seconds']:>9.1f}"
        )
    print()
    print(f"A step takes {ours['step_ms'] / baseline['step_ms']:.3f} times as long as with SDPA.")
    print(
        f"Difference over noise: {agreement['mean_ratio']:.2f} on average, "
        f"{agreement['worst_ratio']:.2f} at worst."
    )
    if report["same_bits"] is not None:
        print(f"Two runs give the same bits: {'yes' if report['same_bits'] else 'NO'}.")
    print(f"Loss curves agree within noise: {agreement['reason'] or 'yes'}.")


def draw_report(report: Mapping[str, Any]) -> str:
    """Both loss curves, and their difference beside the noise, as SVG."""
    runs, windows = report["runs"], report["agreement"]["windows"]
    steps = range(1, report["steps"] + 1)
    middles = [(window["first"] + window["last"]) / 2 for window in windows]
    curves = tuple(
        Series(
            name=f"{name} ({runs[name]['step_ms']:.2f} ms a step)", x=steps, y=runs[name]["losses"]
        )
        for name in (OURS, BASELINE)
    )
    gaps = tuple(
        Series(name=name, x=middles, y=[max(window[key], LEAST_NOISE) for window in windows])
        for name, key in (("flash_attn_func less SDPA", "difference"), ("noise", "noise"))
    )
    environment, model = report["environment"], report["model"]
    caption = (
        f"{environment['gpu_name'] or report['device']}, torch {environment['torch']}; "
        f"{model['layers']} layers, width {model['dim']}, {model['heads_q']} query and "
        f"{model['heads_kv']} key heads, {report['batch']} x {model['seqlen']} bytes a step"
    )
    panels = (
        ("Training loss, one seed, the same batches", "loss, nats a byte", curves, False),
        ("How far the curves are apart, and how far SDPA's own", "rms, nats a byte", gaps, True),
    )
    drawn = []
    for title, y_label, series, logarithmic in panels:
        shown = tuple(line for line in (line.finite() for line in series) if line.x)
        if shown:  # losses that are no numbers leave nothing to draw
            drawn.append(
                Panel(
                    title=title,
                    x_label="step",
                    y_label=y_label,
                    series=shown,
                    logarithmic=logarithmic,
                )
            )
    return draw(drawn, caption)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print, write; see the module for the exit status."""
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        print("train_gpt: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    try:
        sizes, corpus = sizes_of(options), read_corpus()
    except ValueError as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 2
    before = torch.are_deterministic_algorithms_enabled()
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    try:
        report = run(options, sizes, corpus, device)
    finally:
        torch.use_deterministic_algorithms(before)
    print_report(report)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1) + "\n"
        (options.out / "train_gpt.json").write_text(text, encoding="utf-8")
        (options.out / "train_gpt.svg").write_text(draw_report(report), encoding="utf-8")
        print(f"wrote {options.out / 'train_gpt.json'} and train_gpt.svg")
    return 0 if report["agreement"]["ok"] and report["same_bits"] is not False else 1


if __name__ == "__main__":
    sys.exit(main())
