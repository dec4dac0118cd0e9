"""A backward kernel that runs on the host and rounds where the GPU kernels do, so that its results must pass.

P and dS are rounded to the input dtype before their GEMMs, delta comes from the rounded O, and everything else is fp32.
The kernel reads and writes through the params alone, as a GPU kernel does.
"""

from __future__ import annotations

import ctypes

import torch

from attention_autotuner.core.abi import AttentionBackwardParams
from attention_autotuner.core.abi import Tensor as AbiTensor

FLOAT = torch.float32


def strided_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor over memory of this process that another object owns."""
    elements = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class HostBackward:
    """A loaded backward kernel of attention that runs on the host.

    Args:
        dtype: dtype of q, k, v, o and the gradients.

    Attributes:
        launches: number of launches so far.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self._dtype = dtype
        self.launches = 0

    def workspace_bytes(self, params: AttentionBackwardParams) -> int:
        """The size of delta, one fp32 number a row."""
        return 4 * params.batch * params.heads_q * params.seqlen_q

    def launch(
        self, params: AttentionBackwardParams, workspace: int, stream: int, device: int
    ) -> None:
        """Compute the gradients synchronously."""
        p = params
        assert workspace % 256 == 0
        rows_q, rows_k = (p.heads_q, p.seqlen_q), (p.heads_kv, p.seqlen_k)
        group = p.heads_q // p.heads_kv
        dense = (p.batch, *rows_q), (p.heads_q * p.seqlen_q, p.seqlen_q, 1)
        q = self._at(p, p.q, rows_q, p.dim_qk).to(FLOAT)
        k = self._at(p, p.k, rows_k, p.dim_qk).to(FLOAT).repeat_interleave(group, dim=1)
        v = self._at(p, p.v, rows_k, p.dim_v).to(FLOAT).repeat_interleave(group, dim=1)
        o = self._at(p, p.o, rows_q, p.dim_v).to(FLOAT)
        dout = self._at(p, p.dout, rows_q, p.dim_v).to(FLOAT)
        lse = strided_at(p.lse, *dense, FLOAT)[..., None]
        delta = strided_at(workspace, *dense, FLOAT)
        delta.copy_((dout * o).sum(-1))
        if p.dlse:
            delta -= strided_at(p.dlse, *dense, FLOAT)
        probabilities = (p.softmax_scale * (q @ k.mT) - lse).exp().masked_fill(lse.isinf(), 0.0)
        if p.causal:
            limits = torch.arange(p.seqlen_q)[:, None] + p.causal_offset
            probabilities = probabilities.masked_fill(torch.arange(p.seqlen_k) > limits, 0.0)
        ds = self._rounded(probabilities * (dout @ v.mT - delta[..., None]))
        gradients = {
            "dq": p.softmax_scale * (ds @ k),
            "dk": p.softmax_scale * _grouped(ds.mT @ q, group),
            "dv": _grouped(self._rounded(probabilities).mT @ dout, group),
        }
        for name, value in gradients.items():
            rows = rows_q if name == "dq" else rows_k
            self._at(p, getattr(p, name), rows, value.shape[-1]).copy_(value)
        self.launches += 1

    def _at(
        self,
        params: AttentionBackwardParams,
        packed: AbiTensor,
        rows: tuple[int, int],
        columns: int,
    ) -> torch.Tensor:
        strides = (packed.stride_batch, packed.stride_head, packed.stride_row, 1)
        return strided_at(packed.data, (params.batch, *rows, columns), strides, self._dtype)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype).to(FLOAT)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """The sum over the query heads of each key head."""
    return x.unflatten(1, (-1, group)).sum(2)
