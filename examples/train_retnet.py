"""Train a small RetNet, compare its forms of retention with each other, and decode from carried states.

    python -m examples.train_retnet --steps 300 --out results
    python -m examples.train_retnet --device cpu --steps 5 --layers 2 --dim 64 --heads 2 --seqlen 64 --decode 8

It learns the bytes of Python's standard library with ``retention_func``. Then a text that it was not trained on is read
in the parallel, the chunkwise and the recurrent form and token by token, and the logits are compared with those in
fp32. Then it writes on, one token a step, on a GPU by a CUDA graph also. Exits with 0 when all forms are within twice
the rounding of the reference in the same dtype and both ways of decoding write the same text, 1 when not, 2 when this
machine or these sizes cannot be used.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # a first line before the seconds that torch takes
    print("train_retnet: loading PyTorch", file=sys.stderr, flush=True)

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .retnet.decoding import Decoder, with_rounded_weights
from .retnet.model import RetNet, RetNetConfig
from .retnet.training import (
    FORMS,
    TrainingConfig,
    compare_forms,
    error_of,
    held_out_loss,
    read_prompt,
    train,
)
from .shared.script import Session, parser_of, run_script, say


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    sizes = RetNetConfig()
    parser = parser_of(
        "train_retnet",
        __doc__,
        steps=(300, "of training"),
        batch=(16, "sequences a step"),
        seqlen=(512, "bytes a sequence"),
        layers=(sizes.layers, "blocks of the model"),
        dim=(sizes.dim, "width of the model; the feed-forward is twice as wide"),
        heads=(sizes.heads, "of each layer"),
        decode=(256, "tokens to write at the end"),
    )
    option = parser.add_argument
    option("--train-decay", action="store_true", help="train every head's gamma")
    option("--form", choices=("auto", *FORMS), default="auto", help="of training")
    option("--learning-rate", type=float, default=TrainingConfig.learning_rate)
    return parser.parse_args(arguments)


def train_and_decode(options: argparse.Namespace) -> dict[str, Any]:
    """Train, compare and decode; returns the report that is printed and written.

    Raises:
        ValueError: the sizes do not fit each other, or there is no such device.
    """
    names = ("layers", "dim", "heads", "train_decay")
    sizes = RetNetConfig(hidden=2 * options.dim, **{name: getattr(options, name) for name in names})
    config = TrainingConfig(learning_rate=options.learning_rate, form=options.form)
    session = Session("train_retnet", options)
    torch.manual_seed(options.seed)
    model = RetNet(sizes).to(session.device)
    start = time.perf_counter()
    losses = train(model, config, session.batches)
    seconds = time.perf_counter() - start
    say("comparing the forms, then decoding")
    tokens = session.held_out[0][0]
    agreement = compare_forms(model, tokens, config.dtype)
    decoding = decode(model, tokens, options.decode, config.dtype)
    # Both sides of the second comparison are rounded, each by no more than is allowed against fp32.
    ok = agreement.ok and decoding["error"] <= 2 * agreement.allowed
    return session.report(
        sizes,
        config,
        losses=losses,
        held_out_loss=held_out_loss(model, session.held_out, config),
        seconds=seconds,
        agreement={**asdict(agreement), "ok": agreement.ok},
        decoding=decoding,
        ok=ok and decoding["same_text"] is not False,
    )


def decode(model: RetNet, prompt: torch.Tensor, count: int, dtype: torch.dtype) -> dict[str, Any]:
    """Write on from a prompt, and read again at once what was written.

    Returns:
        ``text`` of the first sequence; ``step_ms`` by the way of decoding; ``error``, the relative distance of the
        steps' logits from those of prompt and text read at once; ``same_text``, True where the graph wrote what eager
        steps did, None without a GPU.
    """
    writer = with_rounded_weights(model, dtype)
    first, state = read_prompt(writer, prompt, dtype)
    Decoder(writer, state, first, dtype).run(1)  # builds and loads are no part of a step's time
    (chosen, logits), step_ms = _timed(Decoder(writer, state, first, dtype), count)
    times, same_text = {"eager": step_ms}, None
    if prompt.is_cuda:
        replayed = Decoder(writer, state, first, dtype)
        replayed.capture()
        (again, _), times["graph"] = _timed(replayed, count)
        same_text = bool(torch.equal(chosen, again))
    read = torch.cat((prompt, first, chosen[:, :-1]), dim=1)
    with torch.no_grad(), torch.autocast(prompt.device.type, dtype):
        whole = writer(read)[:, prompt.shape[1] :]
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
    """The decoder's tokens and logits, and the mean milliseconds of a step."""
    start = time.perf_counter()
    tokens, logits = decoder.run(count)
    float(logits.sum())  # waits for the device, as the clock must
    return (tokens, logits), (time.perf_counter() - start) * 1e3 / count


def print_report(report: Mapping[str, Any]) -> None:
    """Print losses, errors and times."""
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
    print(f"agrees: {'yes' if report['ok'] else 'NO'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status that the module promises."""
    return run_script(parse(arguments), train_and_decode, print_report)


if __name__ == "__main__":
    sys.exit(main())
