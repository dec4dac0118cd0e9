"""Multi-scale retention as a module, by either operation: the counterpart of attention in a RetNet.

:class:`MultiScaleRetention` uses ``retention_func``: a decay per head, no normaliser, all three forms, and a state that
can be carried from one call to the next. :class:`NormalisedRetention` has the same parameters and uses
``retnet_attn_func``, which divides every row by the sum of its scores' absolute values; parallel only. Every head's
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

from ..shared.training import turn

Retention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""``retention_func``, or another function that takes and returns the same."""

ROTARY_BASE = 10_000.0
EPSILON = 1e-6
"""Added to the variance of a head's output; small, as the output of a young model is."""


def default_decay_logits(heads: int) -> torch.Tensor:
    """Logits whose sigmoid is ``1 - 2^(-5-h)``: fp32 ``[heads]``."""
    powers = torch.arange(5, 5 + heads, dtype=torch.float64).exp2()
    return (powers - 1).log().float()


def rotate(x: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
    """Rotate pairs of dimensions of ``[batch, seqlen, heads, dim]`` by an angle that grows with the position.

    ``position`` is that of the first token; a tensor of one integer on x's device where a CUDA graph is to move it on.
    """
    pairs = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float32) / x.shape[-1]
    positions = position + torch.arange(x.shape[1], device=x.device)
    angles = positions[:, None, None] * ROTARY_BASE**-pairs  # [seqlen, 1 head, pairs]
    return turn(x, torch.stack((angles.cos(), angles.sin())))


class GatedHeads(nn.Module):
    """Projections before retention, normalisation and gate after it: common to both modules."""

    def __init__(self, dim: int, heads: int, *, train_decay: bool = False) -> None:
        """Make the parameters.

        Args:
            dim: width of the model; ``dim / heads`` is dim_qk, a multiple of 8, and dim_v is twice that.
            heads: number of heads.
            train_decay: True to make every head's gamma a parameter rather than ``1 - 2^(-5-h)`` for good.

        Raises:
            ValueError: the sizes do not fit each other.
        """
        super().__init__()
        if heads < 1 or dim < 1 or dim % (8 * heads):
            raise ValueError(f"dim must be a multiple of 8 heads, got {dim} and {heads} heads")
        self.heads, self.dim_qk, self.dim_v = heads, dim // heads, 2 * dim // heads
        self.to_qkvg = nn.Linear(dim, 6 * dim, bias=False)
        self.out = nn.Linear(2 * dim, dim, bias=False)
        self.decay_logits = nn.Parameter(default_decay_logits(heads)) if train_decay else None

    def gamma(self) -> torch.Tensor | None:
        """The decay of each head, ``[heads]``, with its gradient; None for ``1 - 2^(-5-h)``."""
        return None if self.decay_logits is None else self.decay_logits.float().sigmoid()

    def project(self, x: torch.Tensor, position: int | torch.Tensor) -> list[torch.Tensor]:
        """q, k and v as ``[batch, heads, seqlen, dim]``, and the gate ``[batch, seqlen, heads * dim_v]``."""
        *qkv, gate = self.to_qkvg(x).split([x.shape[-1] * n for n in (1, 1, 2, 2)], dim=-1)
        q, k, v = (projection.unflatten(-1, (self.heads, -1)) for projection in qkv)
        # Transposed views: retention reads them where they lie, and its output lies as q does.
        return [*(y.transpose(1, 2) for y in (rotate(q, position), rotate(k, position), v)), gate]

    def finish(self, o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """From ``[batch, heads, seqlen, dim_v]`` and the gate to ``[batch, seqlen, dim]``."""
        # A group norm whose groups are the heads, over the channels of one token; in fp32 for its small epsilon.
        precise = o.transpose(1, 2).to(torch.promote_types(o.dtype, torch.float32))
        normed = functional.layer_norm(precise, (self.dim_v,), eps=EPSILON).to(o.dtype)
        return self.out(functional.silu(gate) * normed.flatten(2))  # type: ignore[no-any-return]


class MultiScaleRetention(GatedHeads):
    """Retention with a decay per head, in any form, from any state."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        train_decay: bool = False,
        retention: Retention = retention_func,
    ) -> None:
        """As :class:`GatedHeads`; ``retention`` is the function, another that computes the same for comparisons."""
        super().__init__(dim, heads, train_decay=train_decay)
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
            state: the state after those, ``[batch, heads, dim_qk, dim_v]`` in fp32; None for the start of a text.
            return_state: True to return the state after these tokens.
            inplace_state: True to overwrite ``state`` with it; not for training.

        Returns:
            ``[batch, seqlen, dim]``, and the state or None.
        """
        q, k, v, gate = self.project(x, position)
        states = {"initial_state": state, "output_final_state": return_state}
        o, state = self.retention(
            q, k, v, self.gamma(), form=form, inplace_state=inplace_state, **states
        )
        return self.finish(o, gate), state


class NormalisedRetention(GatedHeads):
    """The same function by the normalised op: the whole sequence at once, without states, its decay not trained."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Retention of a whole text, ``[batch, seqlen, dim]``.

        Args:
            x: ``[batch, seqlen, dim]``.
            mask: ``[heads or 1, seqlen, seqlen]`` in the dtype of q and zero above the diagonal, in the place of the
                decay: for decays that depend on more than the distance. It may require a gradient.

        Raises:
            ValueError: there is a mask, and a trained decay that it would leave unused.
        """
        gamma = self.gamma()
        if mask is not None and gamma is not None:
            raise ValueError(
                "a mask takes the place of the decay, and this module trains its decay"
            )
        q, k, v, gate = self.project(x, 0)
        # This op has no gradient of the decay.
        decay = Decay(None if gamma is None else gamma.detach()) if mask is None else mask
        o = retnet_attn_func(q, k, v, decay, scale=self.dim_qk**-0.5, causal=True)
        return self.finish(o, gate)
