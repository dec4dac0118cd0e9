"""This package's attention inside Hugging Face transformers, on a tiny Llama.

    python -m examples.transformers_attention

In a program of your own, ``register()`` once and name the implementation where the model is made:

    register()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=NAME)

Run as a script, this trains a tiny, randomly initialised Llama with grouped-query attention three times: with this
attention in bf16, with SDPA in bf16, and with SDPA in fp32 as the reference. It prints how far logits, gradients and
the losses of a few steps are from the reference, and exits with 0 when none is more than twice as far as with SDPA in
bf16, 1 when one is, 2 when this machine cannot run it or transformers is not installed. Made for transformers 5.17.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # a first line before the seconds that torch takes
    print("transformers_attention: loading PyTorch and transformers", file=sys.stderr, flush=True)

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"cannot run: it needs transformers (pip install transformers): {error}", file=sys.stderr)
    sys.exit(2)

from attention_autotuner import flash_attn_func
from attention_autotuner.errors import UnsupportedProblemError

from .shared.script import device_of, parser_of, run_script, say

NAME = "attention_autotuner"
NOT_SUPPORTED = ["sliding_window", "softcap", "s_aux", "position_bias", "output_attentions"]
NOT_SUPPORTED += ["cu_seq_lens_q", "cu_seq_lens_k"]
"""Arguments of some models beyond plain attention."""

FACTOR = 2.0
"""How many times SDPA's own rounding error may be."""
FLOOR = 2e-4
"""Relative error that is always excused."""


# --- the attention function: copy from here ---------------------------------------------------------


def _refuse(reason: str) -> None:
    raise UnsupportedProblemError(f"attention implementation {NAME!r}: {reason}")


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it in each layer.

    Args:
        module: the layer; its ``is_causal`` decides where the argument does not.
        query: ``[batch, heads_q, seqlen_q, dim]``, fp16 or bf16; anything under autocast, which decides then.
        key: ``[batch, heads_kv, seqlen_k, dim]``; need not be repeated for GQA.
        value: the same.
        attention_mask: must be None; :func:`plain_mask` makes it so or says why not.
        dropout: must be 0.
        scaling: of the scores; ``1 / sqrt(dim)`` when None.
        is_causal: the last query sees all keys, the one before it all but one, and so on.
        **options: anything else is of no consequence here, or must be off.

    Returns:
        ``[batch, seqlen_q, heads_q, dim]``, and None in the place of attention weights.

    Raises:
        UnsupportedProblemError: the layer needs what the kernels cannot do.
    """
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        _refuse(f"no mask but a causal one is supported, got attention_mask of shape {shape}")
    if dropout != 0.0:
        _refuse(f"attention dropout must be 0, got {dropout}")
    for name in NOT_SUPPORTED:
        option = options.get(name)
        if option is not None and option is not False:
            _refuse(f"{name} is not supported, got {option!r:.80}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary embeddings leave query and key in fp32 then
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    o = flash_attn_func(query, key, value, causal=causal, softmax_scale=scaling)
    # The output lies in memory as the query does: for a transposed view this copies nothing.
    return o.transpose(1, 2).contiguous(), None


def plain_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    check_packing: bool = True,
    **options: Any,
) -> None:
    """A mask as transformers asks for it once a forward pass: none is made, for none is needed or none would do.

    Without it transformers would pass no mask to an implementation that it does not know, not even for padded batches.
    To see that a batch has no padding, the values of ``attention_mask`` are read, and the host waits for the GPU: pass
    None for a batch without padding where that matters.

    Args:
        q_length: number of queries.
        kv_length: number of keys, those of the cache included.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: transformers' own name of the pattern.
        attention_mask: bool ``[batch, seqlen]``, False where a token is padding.
        check_packing: True to refuse patterns that may come of several sequences packed in one row.
        **options: ``local_size`` of a window or chunk and ``use_vmap``, for a pattern of the caller's, must be off.

    Raises:
        UnsupportedProblemError: the mask is neither causal to the last key nor absent.
    """
    if options.get("local_size") is not None or options.get("use_vmap"):
        _refuse("only causal and full attention are supported, no windows, chunks or overlays")
    if attention_mask is not None and not bool(attention_mask.all()):
        _refuse("padding is not supported, and attention_mask hides some tokens")
    if mask_function is bidirectional_mask_function:
        return
    if mask_function is not causal_mask_function and check_packing:
        _refuse(
            "packed sequences and masks on top of the causal one are not supported; under torch.compile, which hides "
            "whether there are any, register(check_packing=False) takes your word that there are none"
        )
    if kv_offset != 0 or q_offset + q_length != kv_length:
        queries, keys = (
            f"{q_offset} to {q_offset + q_length}",
            f"{kv_offset} to {kv_offset + kv_length}",
        )
        _refuse(f"causal attention must end at the last key, got queries {queries} and keys {keys}")


def register(*, check_packing: bool = True) -> None:
    """Make ``attn_implementation=NAME`` known to transformers.

    Args:
        check_packing: False to promise that no row holds several sequences and no overlay is asked for, which cannot be
            seen under ``torch.compile``. The other checks stay.
    """
    AttentionInterface.register(NAME, attention)
    masks = functools.partial(plain_mask, check_packing=check_packing)
    AttentionMaskInterface.register(NAME, masks)


# --- a demonstration: to here -----------------------------------------------------------------------


def tiny_llama() -> LlamaConfig:
    """Three layers, eight query heads of 32 dimensions in two groups."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def train(
    implementation: str, dtype: torch.dtype, *, steps: int, tokens: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Train a tiny Llama on one batch.

    Args:
        implementation: of attention, by its name in transformers.
        dtype: that the layers compute in; parameters are fp32.
        steps: of plain gradient descent.
        tokens: int64 ``[batch, seqlen]``.
        seed: of the parameters.

    Returns:
        The logits and the gradients of the first step, and the losses of all, in fp32.
    """
    say(f"training with {implementation} in {dtype}")
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(tiny_llama(), attn_implementation=implementation)
    model = model.to(tokens.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results, losses = {}, []
    for step in range(steps):
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            # A mask that hides nothing, as tokenizers give: it must be seen to be plain.
            out = model(tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
        out.loss.backward()
        if step == 0:
            results["logits"] = out.logits.detach().float()
            for name, parameter in model.named_parameters():
                results[f"gradient of {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.detach().float())
    return {**results, "losses": torch.stack(losses)}


def errors(
    results: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Relative errors by name: the norm of the difference over the norm of the reference."""
    return {name: float((results[name] - x).norm() / x.norm()) for name, x in reference.items()}


def make_report(options: argparse.Namespace) -> dict[str, Any]:
    """Train three times; the relative errors of both attentions in bf16."""
    device = device_of(options)
    register()
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(256, (options.batch, options.seqlen), generator=generator).to(device)
    run = functools.partial(train, steps=options.steps, tokens=tokens, seed=options.seed)
    reference = run("sdpa", torch.float32)
    ours, peer = (errors(run(name, torch.bfloat16), reference) for name in (NAME, "sdpa"))
    allowed = {name: FACTOR * error + FLOOR for name, error in peer.items()}
    # NaN is never excused.
    wrong = [name for name, error in ours.items() if not error <= allowed[name]]
    report = {"example": "transformers_attention", "ours": ours, "sdpa": peer, "allowed": allowed}
    return {**report, "wrong": wrong, "ok": not wrong}


def print_report(report: Mapping[str, Any]) -> None:
    """Print all errors, and those that are too large."""
    print(f"{'relative error':<56}{NAME:>20}{'sdpa':>12}")
    for name, error in report["ours"].items():
        print(f"{name:<56}{error:>20.2e}{report['sdpa'][name]:>12.2e}")
    for name in report["wrong"]:
        print(f"{name}: error {report['ours'][name]:.2e}, allowed {report['allowed'][name]:.2e}")
    if report["ok"]:
        print("agrees with sdpa")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; see the module for the exit status."""
    numbers = {"steps": (10, "of training"), "batch": (4, "sequences"), "seqlen": (256, "tokens")}
    parser = parser_of("transformers_attention", __doc__, **numbers)
    return run_script(parser.parse_args(arguments), make_report, print_report)


if __name__ == "__main__":
    sys.exit(main())
