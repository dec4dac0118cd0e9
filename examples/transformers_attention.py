"""This package's attention inside Hugging Face transformers, on a tiny Llama.

    python -m examples.transformers_attention

In a program of your own, ``register()`` once and name the implementation where the model is made:

    register()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=NAME)

Run as a script, this trains a tiny, randomly initialised Llama with grouped-query attention three times: with this
attention in bf16, with SDPA in bf16, and with SDPA in fp32 as the truth. It prints how far logits, gradients and the
losses of a few steps are from the truth, and exits with 0 when none is more than twice as far as with SDPA in bf16, 1
when one is, 2 when this machine cannot run it. Made for transformers 5.17.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from attention_autotuner import flash_attn_func
from attention_autotuner.errors import UnsupportedProblemError

NAME = "attention_autotuner"
NOT_SUPPORTED = (
    "sliding_window",
    "softcap",
    "s_aux",
    "position_bias",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "output_attentions",
)
"""What some models ask of an attention function beyond plain attention."""

FACTOR = 2.0
"""How many times SDPA's own rounding error may be."""
FLOOR = 2e-4
"""Relative error that is always excused."""


# --- the attention function: copy from here ---------------------------------------------------------


def _refuse(what: str) -> None:
    raise UnsupportedProblemError(f"attention implementation {NAME!r}: {what}")


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
    """What transformers calls in each layer.

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
        given = options.get(name)
        if given is not None and given is not False:
            _refuse(f"{name} is not supported, got {given!r:.80}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary embeddings leave query and key in fp32 then
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    o = flash_attn_func(query, key, value, causal=causal, softmax_scale=scaling)
    # The output lies in memory as the query does: for a transposed view this copies nothing.
    return o.transpose(1, 2).contiguous(), None


def plain_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    *,
    check_packing: bool = True,
    **options: Any,
) -> None:
    """What transformers calls once a forward pass to make a mask: none is made, for none is needed or none would do.

    Without it transformers would pass no mask to an implementation that it does not know, not even for padded batches.
    To see that a batch has no padding, the values of ``attention_mask`` are read, and the host waits for the GPU: pass
    None for a batch without padding where that matters.

    Args:
        batch_size: of no consequence.
        q_length: number of queries.
        kv_length: number of keys, those of the cache included.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: transformers' own name of the pattern.
        attention_mask: bool ``[batch, seqlen]``, False where a token is padding.
        local_size: width of a window or chunk.
        use_vmap: whether the caller brought a pattern of its own.
        check_packing: whether to refuse patterns that may come of several sequences packed in one row.
        **options: of no consequence.

    Raises:
        UnsupportedProblemError: the mask is neither causal to the last key nor absent.
    """
    if local_size is not None or use_vmap:
        _refuse(
            "only plain causal attention and full attention are supported, no windows, chunks or overlays"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        _refuse("padding is not supported, and attention_mask hides some tokens")
    if mask_function is bidirectional_mask_function:
        return
    if mask_function is not causal_mask_function and check_packing:
        _refuse(
            "packed sequences and masks on top of the causal one are not supported; under torch.compile transformers "
            "cannot tell whether sequences are packed, and register(check_packing=False) takes your word that none are"
        )
    if kv_offset != 0 or q_offset + q_length != kv_length:
        _refuse(
            f"causal attention must end at the last key, got queries {q_offset} to {q_offset + q_length} and keys "
            f"{kv_offset} to {kv_offset + kv_length} (a static cache?)"
        )


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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one model gave: logits and gradients of the first step, and the loss of every step, all in fp32."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]
    losses: torch.Tensor


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
) -> Outcome:
    """Train a tiny Llama on one batch.

    Args:
        implementation: of attention, by its name in transformers.
        dtype: that the layers compute in; weights are fp32.
        steps: of plain gradient descent.
        tokens: int64 ``[batch, seqlen]``.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(tiny_llama(), attn_implementation=implementation)
    model = model.to(tokens.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, logits, gradients = [], torch.empty(0), {}
    for step in range(steps):
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            # A mask that hides nothing, as tokenizers give: it must be seen to be plain.
            out = model(tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
        out.loss.backward()
        if step == 0:
            logits = out.logits.detach().float()
            gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.detach().float())
    return Outcome(logits=logits, gradients=gradients, losses=torch.stack(losses))


def errors(found: Outcome, truth: Outcome) -> dict[str, float]:
    """Relative errors by name: the norm of the difference over the norm of the truth."""
    pairs = {"logits": (found.logits, truth.logits), "losses": (found.losses, truth.losses)}
    for name, gradient in truth.gradients.items():
        pairs[f"gradient of {name}"] = (found.gradients[name], gradient)
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


def disagreements(ours: Mapping[str, float], peers: Mapping[str, float]) -> list[str]:
    """One line for each error of ours that the peer's does not excuse; NaN is never excused."""
    return [
        f"{name}: error {ours[name]:.2e}, allowed {FACTOR * peers[name] + FLOOR:.2e}"
        for name in peers
        if not ours[name] <= FACTOR * peers[name] + FLOOR
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; see the module for the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.transformers_attention",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch", "seqlen"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        print("transformers_attention: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    register()
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(256, (options.batch, options.seqlen), generator=generator).to(device)
    run = functools.partial(train, steps=options.steps, tokens=tokens, seed=options.seed)
    truth = run("sdpa", torch.float32)
    peer, ours = run("sdpa", torch.bfloat16), run(NAME, torch.bfloat16)
    our_errors, peer_errors = errors(ours, truth), errors(peer, truth)
    print(f"{'relative error':<56}{NAME:>20}{'sdpa':>12}")
    for name, peer_error in peer_errors.items():
        print(f"{name:<56}{our_errors[name]:>20.2e}{peer_error:>12.2e}")
    for name, outcome in ((NAME, ours), ("sdpa", peer)):
        curve = " ".join(f"{loss:.4f}" for loss in outcome.losses.tolist())
        print(f"losses with {name}: {curve}")
    found = disagreements(our_errors, peer_errors)
    print("\n".join(found) or "agrees with sdpa")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
