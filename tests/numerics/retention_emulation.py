"""Retention kernels that run on the host and round where the GPU kernels do, so that their results must pass.

Operands of GEMMs are rounded to the input dtype and everything else is fp32. The kernels read and write through the
params alone, as GPU kernels do.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attention_autotuner.operations.retnet.reference import (
    retnet_attention,
    retnet_attention_backward,
)

from .emulation import FLOAT, strided_at

POWERS = torch.float64


class Host:
    """Base class of the kernels below.

    Args:
        dtype: dtype of the 16-bit tensors.

    Attributes:
        launches: number of launches so far.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.dtype = dtype
        self.launches = 0

    def workspace_bytes(self, params: Any) -> int:
        """A size above 0, so that the guards of the workspace are checked."""
        return 64

    def launch(self, params: Any, workspace: int, stream: int, device: int) -> None:
        """Compute synchronously."""
        assert workspace % 256 == 0
        self.compute(params)
        self.launches += 1

    def compute(self, p: Any) -> None:
        """Read, compute, write."""
        raise NotImplementedError

    def at(self, packed: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """A strided 16-bit tensor of the params."""
        strides = (packed.stride_batch, packed.stride_head, packed.stride_row, 1)
        return strided_at(packed.data, shape, strides, self.dtype)

    def dense(self, address: int | None, *shape: int) -> torch.Tensor | None:
        """A contiguous fp32 tensor, None where there is none."""
        if not address:
            return None
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return strided_at(address, shape, strides, FLOAT)

    def read(self, p: Any, *names: str) -> list[torch.Tensor]:
        """Tensors in fp32; k and v are repeated for every query head."""
        return [
            self.at(getattr(p, name), self.shape(p, name))
            .to(FLOAT)
            .repeat_interleave(p.heads_q // p.heads_kv if name in ("k", "v") else 1, dim=1)
            for name in names
        ]

    def shape(self, p: Any, name: str) -> tuple[int, ...]:
        """The shape of a tensor with rows of head dims."""
        like = {"dq": "q", "dk": "k", "dv": "v", "dout": "o"}.get(name, name)
        seqlen_q = p.seqlen if hasattr(p, "seqlen") else p.seqlen_q
        seqlen_k = p.seqlen if hasattr(p, "seqlen") else p.seqlen_k
        return {
            "q": (p.batch, p.heads_q, seqlen_q, p.dim_qk),
            "k": (p.batch, p.heads_kv, seqlen_k, p.dim_qk),
            "v": (p.batch, p.heads_kv, seqlen_k, p.dim_v),
            "o": (p.batch, p.heads_q, seqlen_q, p.dim_v),
        }[like]

    def write(self, p: Any, name: str, value: torch.Tensor) -> None:
        """Write an output, summed over the query heads of a key head where it has key heads."""
        target = self.at(getattr(p, name), self.shape(p, name))
        target.copy_(value.unflatten(1, (target.shape[1], -1)).sum(2))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """A GEMM operand rounded to the input dtype, scaled by a power of two into the range of fp16."""
        top = float(x.abs().max()) if x.numel() else 0.0
        scale = 2.0 ** max(0, math.ceil(math.log2(max(top, 1.0))) - 14)
        return (x / scale).to(self.dtype).to(FLOAT) * scale


class HostRetention(Host):
    """Retention forward, of any form."""

    def compute(self, p: Any) -> None:
        """Compute over all pairs of tokens."""
        q, k, v = self.read(p, "q", "k", "v")
        within, entering, leaving, whole = self.decays(p)
        o = self.rounded((q @ k.mT) * within) @ v
        state = whole.new_zeros(p.batch, p.heads_q, p.dim_qk, p.dim_v, dtype=FLOAT)
        initial = self.dense(p.initial_state, *state.shape)
        if initial is not None:
            o += entering * (q @ self.rounded(initial))
            state = whole * initial
        state = state + self.rounded(leaving * k).mT @ v
        final = self.dense(p.final_state, *state.shape)
        if final is not None:
            final.copy_(state)
        self.write(p, "o", p.scale * o)

    def decays(self, p: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """gamma to the powers i-j (0 for i < j), i+1, L-1-j and L."""
        log2 = self.dense(p.log2_gamma, p.heads_q)
        assert log2 is not None
        log2 = log2.to(POWERS).view(-1, 1, 1)
        index = torch.arange(p.seqlen, dtype=POWERS)
        distance = index[:, None] - index
        within = (distance.clamp(min=0) * log2).exp2().masked_fill(distance < 0, 0.0)
        entering, leaving = ((n[:, None] * log2).exp2() for n in (index + 1, p.seqlen - 1 - index))
        whole = (p.seqlen * log2).exp2()
        return within.to(FLOAT), entering.to(FLOAT), leaving.to(FLOAT), whole.to(FLOAT)


class HostRetentionBackward(HostRetention):
    """Retention backward."""

    def compute(self, p: Any) -> None:
        """Compute over all pairs of tokens."""
        q, k, v, dout = self.read(p, "q", "k", "v", "dout")
        within, entering, leaving, whole = self.decays(p)
        states = (p.batch, p.heads_q, p.dim_qk, p.dim_v)
        initial, dfinal = (self.dense(x, *states) for x in (p.initial_state, p.dfinal_state))
        a, da = (q @ k.mT) * within, (dout @ v.mT) * within
        dq = p.scale * (self.rounded(da) @ k)
        dk = p.scale * (self.rounded(da).mT @ q)
        dv = p.scale * (self.rounded(a).mT @ dout)
        index = torch.arange(p.seqlen, dtype=FLOAT)
        shares = p.scale * ((index[:, None] - index) * a * (dout @ v.mT)).sum((-2, -1))
        dinitial = p.scale * (self.rounded(entering * q).mT @ dout)
        if initial is not None:
            seen = p.scale * entering * (dout @ self.rounded(initial).mT)
            dq += seen
            shares += ((index + 1)[:, None] * seen * q).sum((-2, -1))
        if dfinal is not None:
            kept = leaving * (v @ self.rounded(dfinal).mT)
            dk += kept
            dv += leaving * (k @ self.rounded(dfinal))
            shares += ((p.seqlen - 1 - index)[:, None] * kept * k).sum((-2, -1))
            dinitial += whole * dfinal
            if initial is not None:
                shares += p.seqlen * (whole * initial * dfinal).sum((-2, -1))
        for name, value in (("dq", dq), ("dk", dk), ("dv", dv)):
            self.write(p, name, value)
        for address, value in (
            (p.dinitial_state, dinitial),
            (p.dlog2_gamma, math.log(2) * shares),
        ):
            target = self.dense(address, *value.shape)
            if target is not None:
                target.copy_(value)


class HostRetnet(Host):
    """Masked, normalised retention forward, by the formula of the reference."""

    def compute(self, p: Any) -> None:
        """Compute in fp32."""
        q, k, v = self.read(p, "q", "k", "v")
        o, r = retnet_attention(q, k, v, self.mask(p), **self.options(p))
        self.write(p, "o", o)
        target = self.dense(p.r, p.batch, p.heads_q, p.seqlen_q)
        if target is not None:
            target.copy_(r)

    def options(self, p: Any) -> dict[str, Any]:
        """Keyword arguments of the reference."""
        assert not p.causal or p.causal_offset == p.seqlen_k - p.seqlen_q
        options: dict[str, Any] = {"scale": p.scale, "causal": bool(p.causal)}
        if getattr(p, "normalize", 1) and (hasattr(p, "normalize") or p.r):
            limit = p.r_clamp_max
            return options | {"r_clamp_max": None if math.isinf(limit) else limit}
        return options | {"normalize": False}

    def mask(self, p: Any) -> torch.Tensor:
        """The mask of every query head."""
        if not p.mask.data:
            log2 = self.dense(p.log2_gamma, p.heads_q)
            assert log2 is not None
            rows = torch.arange(p.seqlen_q, dtype=POWERS)[:, None] + p.causal_offset
            distance = rows - torch.arange(p.seqlen_k, dtype=POWERS)
            powers = (distance.clamp(min=0) * log2.to(POWERS).view(-1, 1, 1)).exp2()
            return powers.masked_fill(distance < 0, 0.0).to(FLOAT)
        return self.at(p.mask, (1, p.heads_q, p.seqlen_q, p.seqlen_k))[0].to(FLOAT)


class HostRetnetBackward(HostRetnet):
    """Masked, normalised retention backward."""

    def compute(self, p: Any) -> None:
        """Compute in fp32."""
        q, k, v, dout = self.read(p, "q", "k", "v", "dout")
        dq, dk, dv, dmask = retnet_attention_backward(
            dout,
            q,
            k,
            v,
            self.mask(p),
            r_grad=bool(p.r_grad),
            need_dmask=bool(p.dmask.data),
            **self.options(p),
        )
        for name, value in (("dq", dq), ("dk", dk), ("dv", dv)):
            self.write(p, name, value)
        if dmask is not None:
            shared = p.mask.stride_head == 0
            heads = 1 if shared else p.heads_q
            target = self.at(p.dmask, (1, heads, p.seqlen_q, p.seqlen_k))[0]
            target.copy_(dmask.sum(0, keepdim=True) if shared else dmask)


HOSTS: dict[tuple[str, str], type[Host]] = {
    ("retention", "forward"): HostRetention,
    ("retention", "backward"): HostRetentionBackward,
    ("retnet", "forward"): HostRetnet,
    ("retnet", "backward"): HostRetnetBackward,
}
