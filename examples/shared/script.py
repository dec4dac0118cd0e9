"""Command lines of the examples: options, the device, progress, and where results go."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attention_autotuner.tuning.environment import collect

from .data import Batches, read_corpus

HELD_OUT_BATCHES = 8


def say(line: str) -> None:
    """Print a line about the work under way."""
    print(line, file=sys.stderr, flush=True)


def parser_of(name: str, doc: str | None, **numbers: tuple[int, str]) -> argparse.ArgumentParser:
    """A parser with ``--device``, ``--out`` and an option for each number of at least 1: its default and its help."""
    first = (doc or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=first)
    for option, (default, words) in numbers.items():
        flag = "--" + option.replace("_", "-")
        parser.add_argument(flag, type=_positive, default=default, help=f"{words} ({default})")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (0)")
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--out", type=Path, help=f"folder for {name}.json")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def device_of(options: argparse.Namespace) -> torch.device:
    """The device to run on.

    Raises:
        ValueError: it is a GPU and there is none.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU on this machine")
    return device


def run_script(
    options: argparse.Namespace,
    make: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[Mapping[str, Any]], None],
) -> int:
    """Make a report, print it, and write it to ``options.out``.

    Returns:
        The exit status: 0 where the report says ``ok``, 1 where not, 2 and one line where this machine or these
        sizes cannot be used.
    """
    try:
        report = make(options)
    except ValueError as error:
        say(f"cannot run: {error}")
        return 2
    show(report)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{report['example']}.json"
        path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    return 0 if report["ok"] else 1


class Session:
    """A training script's device, text and batches, and the part of its report that says so."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options, self.device = name, options, device_of(options)
        size = f"{options.batch} x {options.seqlen} bytes"
        say(f"{name}: training on {self.device}, {options.steps} steps of {size}")
        self.corpus = corpus = read_corpus()
        shape = {"batch": options.batch, "seqlen": options.seqlen, "device": str(self.device)}
        steps, seed = options.steps, options.seed
        self.batches = Batches(corpus.train, count=steps, seed=seed, **shape)
        self.held_out = Batches(corpus.held_out, count=HELD_OUT_BATCHES, seed=0, **shape)
        if self.device.type == "cpu" and options.batch * options.seqlen * options.dim > 2**20:
            say("a CPU takes long at these sizes; less: --batch 2 --layers 2 --dim 64 --seqlen 64")

    def report(self, model: Any, training: Any, **rest: Any) -> dict[str, Any]:
        """The report: sizes of model and training, text, environment, and the rest."""
        return {
            "example": self.name,
            "device": str(self.device),
            **{name: getattr(self.options, name) for name in ("steps", "batch", "seqlen", "seed")},
            "model": asdict(model),
            "training": asdict(training),
            "corpus": {"files": self.corpus.files, "digest": self.corpus.digest},
            "environment": collect(self.device.index or 0).to_json(),
            **rest,
        }


class Progress:
    """Lines about the steps of a training: the first and the last, and one every two seconds between."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.start = self.last = time.perf_counter()

    def __call__(self, step: int) -> None:
        """Step ``step``, counted from 0, was done; the loss stays where it is, as reading it would wait for a GPU."""
        now, done = time.perf_counter(), step + 1
        if step and done < self.steps and now - self.last < 2.0:
            return
        self.last = now
        pace = (now - self.start) / done
        left = pace * (self.steps - done)
        say(f"step {done}/{self.steps}, {pace:.2f} s a step, {left:.0f} s left")
