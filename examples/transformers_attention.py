"""This package's attention inside Hugging Face transformers, on tiny Llama, Mistral, Gemma and gpt-oss models.

    python -m examples.transformers_attention

In a program of your own, import ``attention_autotuner.compat.transformers`` and name the implementation:

    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="attention_autotuner")

Run as a script, this makes randomly initialised models with grouped heads, windows (Mistral, Gemma, gpt-oss), a
softcap (Gemma) and sinks (gpt-oss), trains each for a few steps on a batch with padding and lets it generate from
padded prompts with a growing and a static cache: with this attention in bf16, with transformers' own in bf16 (SDPA, or
eager for what SDPA lacks), and with eager attention in fp32 as the reference. It prints how far logits, gradients and
losses are from the reference, and exits with 0 when none is more than twice as far as with transformers' own in bf16,
1 when one is, 2 when this machine cannot run it or transformers is not installed.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # a first line before the seconds that torch takes
    print("transformers_attention: loading PyTorch and transformers", file=sys.stderr, flush=True)

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

try:
    from transformers import (
        AutoModelForCausalLM,
        Gemma2Config,
        GptOssConfig,
        LlamaConfig,
        MistralConfig,
    )
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"cannot run: it needs transformers (pip install transformers): {error}", file=sys.stderr)
    sys.exit(2)

from attention_autotuner.compat.transformers import NAME

from .shared.script import device_of, parser_of, run_script, say

FACTOR = 2.0
"""How many times the rounding error of transformers' own attention may be."""
FLOOR = 2e-3
"""Relative error that is always excused."""

VOCABULARY, PADDING, WINDOW = 256, 0, 16
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # for scores that a softcap changes
    "tie_word_embeddings": False,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Experts that are all chosen, as rounding could choose others.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
SOFTCAP = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32}
MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "llama": (LlamaConfig, SIZES, "sdpa"),
    "mistral": (MistralConfig, SIZES | {"sliding_window": WINDOW}, "sdpa"),
    "gemma": (Gemma2Config, SIZES | {"sliding_window": WINDOW} | SOFTCAP, "eager"),
    "gpt_oss": (GptOssConfig, SIZES | {"sliding_window": WINDOW} | EXPERTS, "eager"),
}
"""Configurations, and transformers' own attention that has all that they need."""


def make_model(name: str, implementation: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A model of ``MODELS`` on the CPU; the same parameters, rounded to bf16, for all implementations and dtypes."""
    torch.manual_seed(seed)
    kind, sizes, _ = MODELS[name]
    model = AutoModelForCausalLM.from_config(kind(**sizes), attn_implementation=implementation)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)  # the usual ones are too small to see
        if "router" in parameter_name:
            parameter.requires_grad_(False)  # its gradients are small differences of large numbers
    return model.bfloat16().to(dtype).eval()


def make_batch(batch: int, seqlen: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[batch, seqlen]`` and their mask: rows with more and more padding on the left, up to half."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (batch, seqlen), generator=generator)
    missing = torch.arange(batch) * seqlen // (2 * batch)
    mask = torch.arange(seqlen) >= missing[:, None]
    return tokens.masked_fill(~mask, PADDING), mask.long()


def train(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, steps: int
) -> dict[str, torch.Tensor]:
    """Train a model on one batch by plain gradient descent.

    Returns:
        The gradients of the first step, and the losses of all, in fp32.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    # The first token is predicted from padding, where implementations differ.
    labels = tokens.masked_fill(mask.cumsum(-1) < 2, -100)
    results, losses = {}, []
    for step in range(steps):
        loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        if step == 0:
            named = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
            results = {f"gradient of {name}": x.float() for name, x in named.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return {**results, "losses": torch.stack(losses)}


def decode(model: Any, tokens: torch.Tensor, mask: torch.Tensor, cache: str, count: int) -> Any:
    """Generate tokens greedily.

    Returns:
        All tokens ``[batch, seqlen + count]``, and the logits ``[batch, count, vocabulary]`` that chose the last ones.
    """
    options: dict[str, Any] = {
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    options |= {"cache_implementation": cache, "max_new_tokens": count, "min_new_tokens": count}
    out = model.generate(tokens, attention_mask=mask, **options)
    return out.sequences, torch.stack(out.logits, dim=1).float()


@torch.no_grad()
def chosen_by(model: Any, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits that would choose the tokens after the masked ones, by one pass over all."""
    count = sequences.shape[1] - mask.shape[1]
    mask = torch.nn.functional.pad(mask, (0, count), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits: torch.Tensor = model(sequences, attention_mask=mask, position_ids=positions).logits
    return logits[:, -count - 1 : -1].float()


def compare(
    name: str, tokens: torch.Tensor, mask: torch.Tensor, *, steps: int, count: int, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Relative errors of this attention and of transformers' own, by what was compared."""
    ours, peer, reference = (
        make_model(name, implementation, dtype, seed).to(tokens.device)
        for implementation, dtype in (
            (NAME, torch.bfloat16),
            (MODELS[name][2], torch.bfloat16),
            ("eager", torch.float32),
        )
    )
    errors = {}
    for cache in ("dynamic", "static"):
        sequences, logits = decode(ours, tokens, mask, cache, count)
        expected, others = (chosen_by(model, sequences, mask) for model in (reference, peer))
        errors[f"logits, {cache} cache"] = _errors(logits, others, expected)
    results = [train(model, tokens, mask, steps) for model in (ours, peer, reference)]
    for what in results[2]:
        errors[what] = _errors(*(result[what] for result in results))
    return errors


def _errors(ours: torch.Tensor, peer: torch.Tensor, x: torch.Tensor) -> tuple[float, float]:
    return float((ours - x).norm() / x.norm()), float((peer - x).norm() / x.norm())


def make_report(options: argparse.Namespace) -> dict[str, Any]:
    """Compare all models; errors by model and by what was compared."""
    device = device_of(options)
    batch = [x.to(device) for x in make_batch(options.batch, options.seqlen, options.seed)]
    errors = {}
    for name in MODELS:
        say(f"training {name}, and generating with it, on {device}")
        count = options.new_tokens
        errors[name] = compare(name, *batch, steps=options.steps, count=count, seed=options.seed)
    wrong = [
        f"{name}: {what}"
        for name, by_name in errors.items()
        for what, (ours, peer) in by_name.items()
        if not ours <= FACTOR * peer + FLOOR  # NaN is never excused
    ]
    return {
        "example": "transformers_attention",
        "errors": errors,
        "wrong": wrong,
        "ok": not wrong,
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Print all errors, and those that are too large."""
    print(f"{'relative error':<70}{NAME:>20}{'transformers':>14}")
    for name, errors in report["errors"].items():
        for what, (ours, peer) in errors.items():
            print(f"{name + ': ' + what:<70}{ours:>20.2e}{peer:>14.2e}")
    for what in report["wrong"]:
        print(f"too far from the reference: {what}")
    if report["ok"]:
        print("agrees with transformers' own attention")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; see the module for the exit status."""
    numbers = {
        "steps": (5, "of training"),
        "batch": (4, "sequences"),
        "seqlen": (64, "tokens"),
        "new_tokens": (20, "tokens that are generated"),
    }
    parser = parser_of("transformers_attention", __doc__, **numbers)
    return run_script(parser.parse_args(arguments), make_report, print_report)


if __name__ == "__main__":
    sys.exit(main())
