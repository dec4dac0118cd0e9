"""Multi-scale retention as a module, by either op: what RetNet has in the place of attention.

:class:`MultiScaleRetention` uses ``retention_func``: a decay per head, no normaliser, all three forms, and a state that
can be carried from one call to the next. :class:`NormalisedRetention` has the same parameters and uses
``retnet_attn_func``, which divides every row by the sum of its weights' absolute values; parallel only. Every head's
output is normalised afterwards, so the divisor changes nothing but the range of numbers in between: the two modules are
one function.

Positions enter by a rotation of q and k, as in xPos. Its other half, scales that grow along the sequence, is left to
the decay of the heads: scaled keys would overflow fp16 after a few thousand tokens, and a carried state with them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from attention_autotuner import Decay, retention_func, retnet_attn_func

Retention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""``retention_func``, or something that takes and answers the same."""

ROTARY_BASE = 10_000.0
EPSILON = 1e-6
"""Added to the variance of a head's output; small, as the output of a young model is."""


def default_decay_logits(heads: int) -> torch.Tensor:
    """What the sigmoid makes ``1 - 2^(-5-h)`` of: fp32 ``[heads]``."""
    powers = torch.arange(5, 5 + heads, dtype=torch.float64).exp2()
    return (powers - 1).log().float()


def rotate(x: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
    """Turn pairs of dimensions by an angle that grows with the position.

    Args:
        x: ``[batch, seqlen, heads, dim]``, dim even.
        position: of the first token; a tensor of one integer on x's device where a CUDA graph is to move it on.

    Returns:
        x's shape and dtype; computed in fp32.
    """
    dim = x.shape[-1]
    pairs = torch.arange(0, dim, 2, device=x.device, dtype=torch.float32)
    positions = position + torch.arange(x.shape[1], device=x.device)
    angles = positions[:, None, None] * ROTARY_BASE ** (-pairs / dim)  # [seqlen, 1 head, pairs]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class GatedHeads(nn.Module):
    """What both modules share: projections before retention, normalisation and gate after it."""

    def __init__(
        self, dim: int, heads: int, *, rotary: bool = True, train_decay: bool = False
    ) -> None:
        """Sizes and switches.

        Args:
            dim: width of the model; ``dim / heads`` is dim_qk, a multiple of 8, and dim_v is twice that.
            heads: number of heads.
            rotary: whether positions turn q and k.
            train_decay: whether every head's gamma is a parameter rather than ``1 - 2^(-5-h)`` for good.

        Raises:
            ValueError: the sizes do not fit each other.
        """
        super().__init__()
        if heads < 1 or dim < 1 or dim % (8 * heads):
            raise ValueError(f"dim must be a multiple of 8 heads, got {dim} and {heads} heads")
        self.heads, self.dim_qk, self.dim_v = heads, dim // heads, 2 * dim // heads
        self.rotary = rotary
        self.widths = [heads * size for size in (self.dim_qk, self.dim_qk, self.dim_v, self.dim_v)]
        self.to_qkvg = nn.Linear(dim, sum(self.widths), bias=False)
        self.out = nn.Linear(heads * self.dim_v, dim, bias=False)
        logits = default_decay_logits(heads) if train_decay else None
        self.decay_logits = None if logits is None else nn.Parameter(logits)

    def gamma(self) -> torch.Tensor | None:
        """The decay of each head, ``[heads]``, with its gradient; None for ``1 - 2^(-5-h)``."""
        return None if self.decay_logits is None else self.decay_logits.float().sigmoid()

    def project(
        self, x: torch.Tensor, position: int | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Everything that a token gives.

        Returns:
            q and k ``[batch, heads, seqlen, dim_qk]``, v ``[batch, heads, seqlen, dim_v]``, and the gate
            ``[batch, seqlen, heads * dim_v]``.
        """
        *qkv, gate = self.to_qkvg(x).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in qkv)
        if self.rotary:
            q, k = rotate(q, position), rotate(k, position)
        # Transposed views: retention reads them where they lie, and its output lies as q does.
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate

    def finish(self, o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """From ``[batch, heads, seqlen, dim_v]`` and the gate to ``[batch, seqlen, dim]``."""
        o = o.transpose(1, 2)
        # A group norm whose groups are the heads, over the channels of one token; in fp32 for its small epsilon.
        wide = o.to(torch.promote_types(o.dtype, torch.float32))
        normed = functional.layer_norm(wide, (self.dim_v,), eps=EPSILON).to(o.dtype)
        return self.out(functional.silu(gate) * normed.flatten(2))  # type: ignore[no-any-return]


class MultiScaleRetention(GatedHeads):
    """Retention with a decay per head, in any form, from any state."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rotary: bool = True,
        train_decay: bool = False,
        retention: Retention = retention_func,
    ) -> None:
        """As :class:`GatedHeads`.

        Args:
            dim: width of the model.
            heads: number of heads.
            rotary: whether positions turn q and k.
            train_decay: whether gamma is trained.
            retention: the op; another that computes the same is for comparisons.
        """
        super().__init__(dim, heads, rotary=rotary, train_decay=train_decay)
        self.retention = retention

    def forward(
        self,
        x: torch.Tensor,
        *,
        form: str = "auto",
        position: int | torch.Tensor = 0,
        state: torch.Tensor | None = None,
        return_state: bool = False,
        inplace_state: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Retention of some tokens, which may go on where others ended.

        Args:
            x: ``[batch, seqlen, dim]``; the projections must give fp16 or bf16, by autocast for example.
            form: ``"parallel"``, ``"chunkwise"``, ``"recurrent"``, or ``"auto"`` for the fastest known.
            position: how many tokens came before.
            state: what those left, ``[batch, heads, dim_qk, dim_v]`` in fp32; None for the start of a text.
            return_state: whether the state after these tokens is wanted.
            inplace_state: whether it is to overwrite ``state``; not for training.

        Returns:
            ``[batch, seqlen, dim]``, and the state or None.
        """
        q, k, v, gate = self.project(x, position)
        o, state = self.retention(
            q,
            k,
            v,
            self.gamma(),
            form=form,
            initial_state=state,
            output_final_state=return_state,
            inplace_state=inplace_state,
        )
        return self.finish(o, gate), state


class NormalisedRetention(GatedHeads):
    """The same function by the normalised op: the whole sequence at once, without states, its decay not trained."""

    def fixed_gamma(self) -> torch.Tensor | None:
        """The decay of each head without its gradient, which this op does not compute."""
        gamma = self.gamma()
        return None if gamma is None else gamma.detach()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Retention of a whole text.

        Args:
            x: ``[batch, seqlen, dim]``.
            mask: ``[heads or 1, seqlen, seqlen]`` in the dtype of q and zero above the diagonal, in the place of the
                decay: for decays that depend on more than the distance. It may require a gradient.

        Returns:
            ``[batch, seqlen, dim]``.

        Raises:
            ValueError: there is a mask, and a trained decay that it would leave unused.
        """
        if mask is not None and self.decay_logits is not None:
            raise ValueError(
                "a mask takes the place of the decay, and this module trains its decay"
            )
        q, k, v, gate = self.project(x, 0)
        weights = Decay(self.fixed_gamma()) if mask is None else mask
        o = retnet_attn_func(q, k, v, weights, scale=self.dim_qk**-0.5, causal=True)
        return self.finish(o, gate)
