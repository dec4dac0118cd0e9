"""Train a small RetNet, hold its forms of retention against each other, and decode from carried states.

    python -m examples.train_retnet --steps 300 --out /tmp/train_retnet
    python -m examples.train_retnet --device cpu --steps 5 --layers 2 --dim 64 --heads 2 --seqlen 64 --decode 8

It learns the bytes of Python's standard library with ``retention_func``. Then a text that it was not trained on is read
in the parallel, the chunkwise and the recurrent form and token by token, and the logits are held against those in fp32.
Then it writes on, one token a step, on a GPU by a CUDA graph also. Exits with 0 when all forms are within twice the
rounding of the reference in the same dtype and both ways of decoding write the same text, 1 when not, 2 when this
machine or these sizes cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attention_autotuner.tuning.environment import collect

from .gpt.data import Batches, Corpus, read_corpus
from .retnet.decoding import Decoder, with_rounded_weights
from .retnet.model import RetNet, RetNetConfig
from .retnet.training import (
    FORMS,
    TrainingConfig,
    error_of,
    held_out_loss,
    judge_forms,
    read_prompt,
    train,
)

HELD_OUT_BATCHES = 8


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    sizes, defaults = RetNetConfig(), TrainingConfig()
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_retnet", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--layers", type=int, default=sizes.layers)
    parser.add_argument("--dim", type=int, default=sizes.dim, help="width of the model")
    parser.add_argument("--heads", type=int, default=sizes.heads)
    parser.add_argument("--hidden", type=int, help="feed-forward width; default: twice --dim")
    parser.add_argument("--train-decay", action="store_true", help="train every head's gamma")
    parser.add_argument("--form", choices=("auto", *FORMS), default="auto", help="of training")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--decode", type=int, default=256, help="tokens to write at the end")
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--out", type=Path, help="folder for train_retnet.json")
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("batch", 1), ("seqlen", 2), ("decode", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    return options


def sizes_of(options: argparse.Namespace) -> RetNetConfig:
    """The model that the options name.

    Raises:
        ValueError: its sizes do not fit each other.
    """
    return RetNetConfig(
        layers=options.layers,
        dim=options.dim,
        heads=options.heads,
        hidden=2 * options.dim if options.hidden is None else options.hidden,
        train_decay=options.train_decay,
    )


def run(
    options: argparse.Namespace, sizes: RetNetConfig, corpus: Corpus, device: torch.device
) -> dict[str, Any]:
    """Train, compare and decode; answers the report that is printed and written."""
    config = TrainingConfig(learning_rate=options.learning_rate, form=options.form)
    shape = {"batch": options.batch, "seqlen": options.seqlen, "device": str(device)}
    held_out = Batches(corpus.held_out, count=HELD_OUT_BATCHES, seed=0, **shape)
    torch.manual_seed(options.seed)
    model = RetNet(sizes).to(device)
    start = time.perf_counter()
    losses = train(
        model, config, Batches(corpus.train, count=options.steps, seed=options.seed, **shape)
    )
    seconds = time.perf_counter() - start
    tokens = held_out[0][0]
    agreement = judge_forms(model, tokens, config.dtype)
    return {
        "example": "train_retnet",
        "device": str(device),
        "steps": options.steps,
        "batch": options.batch,
        "seqlen": options.seqlen,
        "model": asdict(sizes),
        "training": {**asdict(config), "dtype": str(config.dtype), "seed": options.seed},
        "corpus": {"files": corpus.files, "digest": corpus.digest},
        "environment": collect(device.index or 0).to_json(),
        "losses": losses,
        "held_out_loss": held_out_loss(model, held_out, config),
        "seconds": seconds,
        "agreement": {**asdict(agreement), "ok": agreement.ok},
        "decoding": decode(model, tokens, options.decode, config.dtype),
    }


def decode(model: RetNet, prompt: torch.Tensor, count: int, dtype: torch.dtype) -> dict[str, Any]:
    """Write on from a prompt, and read again at once what was written.

    Returns:
        ``text`` of the first sequence; ``step_ms`` by the way of decoding; ``error``, how far the logits of the steps
        are from those of prompt and text read at once, relative; ``same_text``, whether the graph wrote what eager
        steps did, None without a GPU.
    """
    writer = with_rounded_weights(model, dtype)
    first, state = read_prompt(writer, prompt, dtype)

    def start() -> Decoder:
        return Decoder(writer, state, first, dtype)

    start().run(1)  # what is built or loaded at the first step is no part of its time
    (chosen, logits), step_ms = _timed(start(), count)
    times, same_text = {"eager": step_ms}, None
    if prompt.is_cuda:
        replayed = start()
        replayed.capture()
        (again, _), times["graph"] = _timed(replayed, count)
        same_text = bool(torch.equal(chosen, again))
    read = torch.cat((first, chosen[:, :-1]), dim=1)
    with torch.no_grad(), torch.autocast(prompt.device.type, dtype):
        whole = writer(torch.cat((prompt, read), dim=1))[:, prompt.shape[1] :]
    written = bytes(torch.cat((first, chosen), dim=1)[0].tolist())
    return {
        "tokens": count,
        "state_bytes": sum(layer.numel() * layer.element_size() for layer in state.layers),
        "step_ms": times,
        "error": error_of(logits, whole),
        "same_text": same_text,
        "text": written.decode("utf-8", errors="replace"),
    }


def _timed(decoder: Decoder, count: int) -> tuple[tuple[torch.Tensor, torch.Tensor], float]:
    """What the decoder wrote, and the mean milliseconds of a step."""
    start = time.perf_counter()
    found = decoder.run(count)
    float(found[1].sum())  # waits for the device, as the clock must
    return found, (time.perf_counter() - start) * 1e3 / count


def is_ok(report: Mapping[str, Any]) -> bool:
    """Whether forms agree, steps agree with the whole, and the graph with eager steps."""
    agreement, decoding = report["agreement"], report["decoding"]
    # Both sides of the comparison are rounded, each by no more than is allowed against fp32.
    steps_agree: bool = decoding["error"] <= 2 * agreement["allowed"]
    return bool(agreement["ok"]) and steps_agree and decoding["same_text"] is not False


def print_report(report: Mapping[str, Any]) -> None:
    """Losses, errors and times, for reading."""
    losses, agreement, decoding = report["losses"], report["agreement"], report["decoding"]
    print(
        f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {report['steps']} steps and "
        f"{report['seconds']:.1f} s; held out {report['held_out_loss']:.4f} nats a byte"
    )
    print(f"relative error of logits against fp32, {agreement['allowed']:.2e} allowed:")
    for name, error in agreement["errors"].items():
        print(f"  {name:<16}{error:.2e}")
    times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in decoding["step_ms"].items())
    print(f"a step of decoding: {times}; state {decoding['state_bytes'] / 2**20:.2f} MiB")
    print(f"steps against the whole text: {decoding['error']:.2e}")
    if decoding["same_text"] is not None:
        print(f"the graph writes the same text: {'yes' if decoding['same_text'] else 'NO'}")
    print(f"agrees: {'yes' if is_ok(report) else 'NO'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, decode, print, write; see the module for the exit status."""
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        print("train_retnet: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    try:
        sizes, corpus = sizes_of(options), read_corpus()
    except ValueError as error:
        print(f"train_retnet: {error}", file=sys.stderr)
        return 2
    report = run(options, sizes, corpus, device)
    report["ok"] = is_ok(report)
    print_report(report)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1) + "\n"
        (options.out / "train_retnet.json").write_text(text, encoding="utf-8")
        print(f"wrote {options.out / 'train_retnet.json'}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
