"""Launches without torch, as in :mod:`.bare_launch`, of the kernels of retnet and retention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attention_autotuner.serving import loader

from .bare_launch import NAN, Call, Floats, Launch, Memory, Values, errors_of, grouped

GAMMAS = (0.97, 0.3, 1.0, 1e-3)  # of heads, in turn


@dataclass(frozen=True, kw_only=True)
class RetentionCall(Call):
    """One launch of retnet or retention.

    Attributes:
        shared: one mask for all heads.
        r_grad: the gradient flows through r.
        whole: all optional inputs and outputs take part: states and their gradients, r, and the gradients of the mask
            and of gamma.
    """

    shared: bool = False
    r_grad: bool = False
    whole: bool = True


def summed(x: Floats, call: Call) -> Floats:
    """The sum over the query heads of each key head."""
    heads = call.problem.heads_kv
    group_sums: Floats = x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(axis=2)
    return group_sums


def powers(call: Call) -> tuple[Floats, Floats, Floats, Floats]:
    """gamma to the powers i+offset-j (0 where that is negative), i+1, L-1-j and L, of every head."""
    p = call.problem
    log2 = np.log2([GAMMAS[head % len(GAMMAS)] for head in range(p.heads_q)])[:, None, None]
    rows, keys = np.arange(p.seqlen_q)[:, None], np.arange(p.seqlen_k)
    distance = rows + p.seqlen_k - p.seqlen_q - keys
    within = np.where(distance >= 0, np.exp2(np.maximum(distance, 0) * log2), 0.0)
    entering = np.exp2((rows + 1) * log2)
    leaving = np.exp2((p.seqlen_k - 1 - keys[:, None]) * log2)
    whole = np.exp2(p.seqlen_k * log2)
    return (
        within.astype(np.float32),
        entering.astype(np.float32),
        leaving.astype(np.float32),
        whole.astype(np.float32),
    )


def masked(values: Values, call: Call) -> tuple[Floats, Floats, Floats, Floats]:
    """S, the mask with causal zeros, the rows' sums of ``|X|``, and r."""
    p = call.problem
    s = call.scale * np.einsum("bhid,bhjd->bhij", values["q"], grouped(values["k"], call))
    mask = values["mask"][0] if p.mask == "explicit" else powers(call)[0]
    if p.causal:
        limits = np.arange(p.seqlen_q)[:, None] + p.seqlen_k - p.seqlen_q
        mask = np.where(np.arange(p.seqlen_k) <= limits, mask, np.float32(0.0))
    total = np.abs(s * mask).sum(axis=-1, keepdims=True)
    return s, mask, total, np.maximum(total, 1.0)


def retnet_forward(values: Values, call: RetentionCall) -> dict[str, Floats]:
    """O and r in fp32."""
    s, mask, _, r = masked(values, call)
    o = np.einsum("bhij,bhjd->bhid", s * mask / r, grouped(values["v"], call))
    return {"o": o} | ({"r": r[..., 0]} if call.whole else {})


def retnet_backward(values: Values, call: RetentionCall) -> dict[str, Floats]:
    """The gradients in fp32, by the formula."""
    s, mask, total, r = masked(values, call)
    dout = values["dout"]
    dx = np.einsum("bhid,bhjd->bhij", dout, grouped(values["v"], call))
    if call.r_grad:
        through = (dout * values["o"]).sum(axis=-1, keepdims=True)
        dx = dx - np.sign(s * mask) * np.where(total > 1.0, through, 0.0)
    dx = dx / r
    ds = dx * mask
    gradients = {
        "dq": call.scale * np.einsum("bhij,bhjd->bhid", ds, grouped(values["k"], call)),
        "dk": call.scale * summed(np.einsum("bhij,bhid->bhjd", ds, values["q"]), call),
        "dv": summed(np.einsum("bhij,bhid->bhjd", s * mask / r, dout), call),
    }
    if call.whole and call.problem.mask == "explicit":
        hidden = np.ones(s.shape[-2:], dtype=bool)
        if call.problem.causal:
            hidden = np.tril(hidden, s.shape[-1] - s.shape[-2])
        dmask = (dx * s * hidden).sum(axis=0, keepdims=True)
        gradients["dmask"] = dmask.sum(axis=1, keepdims=True) if call.shared else dmask
    return gradients


def retention_forward(values: Values, call: RetentionCall) -> dict[str, Floats]:
    """O and the final state in fp32, by all pairs of tokens."""
    q, k, v = values["q"], grouped(values["k"], call), grouped(values["v"], call)
    within, entering, leaving, whole = powers(call)
    o = np.einsum("bhij,bhjd->bhid", np.einsum("bhid,bhjd->bhij", q, k) * within, v)
    state = np.einsum("bhjd,bhje->bhde", leaving * k, v)
    if not call.whole:
        return {"o": call.scale * o}
    o = o + entering * np.einsum("bhid,bhde->bhie", q, values["initial_state"])
    return {"o": call.scale * o, "final_state": whole * values["initial_state"] + state}


def retention_backward(values: Values, call: RetentionCall) -> dict[str, Floats]:
    """The gradients in fp32, by all pairs of tokens."""
    q, k, v = values["q"], grouped(values["k"], call), grouped(values["v"], call)
    dout, scale = values["dout"], call.scale
    within, entering, leaving, whole = powers(call)
    a = np.einsum("bhid,bhjd->bhij", q, k) * within
    dp = np.einsum("bhid,bhjd->bhij", dout, v)
    dq = scale * np.einsum("bhij,bhjd->bhid", dp * within, k)
    dk = scale * np.einsum("bhij,bhid->bhjd", dp * within, q)
    dv = scale * np.einsum("bhij,bhid->bhjd", a, dout)
    more: dict[str, Floats] = {}
    if call.whole:
        state, dstate = values["initial_state"], values["dfinal_state"]
        index = np.arange(call.problem.seqlen_q, dtype=np.float32)
        seen = scale * entering * np.einsum("bhie,bhde->bhid", dout, state)
        kept = leaving * np.einsum("bhje,bhde->bhjd", v, dstate)
        shares = scale * ((index[:, None] - index) * a * dp).sum((-2, -1))
        shares += ((index + 1)[:, None] * seen * q).sum((-2, -1))
        shares += (index[::-1, None] * kept * k).sum((-2, -1))
        shares += len(index) * (whole * state * dstate).sum((-2, -1))
        dq, dk = dq + seen, dk + kept
        dv = dv + leaving * np.einsum("bhjd,bhde->bhje", k, dstate)
        dinitial = scale * np.einsum("bhid,bhie->bhde", entering * q, dout)
        more = {
            "dinitial_state": whole * dstate + dinitial,
            "dlog2_gamma": (np.log(2) * shares).astype(np.float32),
        }
    return {"dq": dq, "dk": summed(dk, call), "dv": summed(dv, call)} | more


REFERENCES = {
    ("retnet", "forward"): retnet_forward,
    ("retnet", "backward"): retnet_backward,
    ("retention", "forward"): retention_forward,
    ("retention", "backward"): retention_backward,
}


class RetentionLaunch(Launch):
    """The tensors of one launch of retnet or retention; arguments as for :class:`.Launch`."""

    call: RetentionCall

    def _fill(self) -> None:
        call, p = self.call, self.call.problem
        for name in ("q", "k", "v"):
            self._draw(name)
        self._set_decay_or_mask()
        if p.op == "retention":
            shape = (p.batch, p.heads_q, p.dim_qk, p.dim_v)
            for name in ("initial_state", "dfinal_state") if call.whole else ():
                if hasattr(self.params, name):
                    self._upload(name, self._source.standard_normal(shape, dtype=np.float32))
        if p.direction == "backward":
            self._draw("dout")
            for name in ("dq", "dk", "dv"):
                self._poison(name)
        else:
            self._poison("o")
        for name, optional in self._optional():
            self._poison_floats(name, optional)
        if p.op == "retnet" and p.direction == "backward":
            self._set_forward_outputs()

    def _set_decay_or_mask(self) -> None:
        p = self.call.problem
        if p.mask != "explicit":
            log2 = np.log2([GAMMAS[head % len(GAMMAS)] for head in range(p.heads_q)])
            self.params.log2_gamma = self._memory.upload(log2.astype(np.float32))
            return
        heads = 1 if self.call.shared else p.heads_q
        shape = (1, heads, p.seqlen_q, p.seqlen_k)
        self._place("mask", self._source.standard_normal(shape, dtype=np.float32))
        if self.call.shared:
            self.params.mask.stride_head = 0

    def _set_forward_outputs(self) -> None:
        call = self.call
        _, _, _, r = masked(self.values, call)
        self.params.r = self._memory.upload(r.astype(np.float32))
        self.params.r_grad = int(call.r_grad)
        if call.r_grad:
            self._place("o", retnet_forward(self.values, call)["o"])
        if call.whole and call.problem.mask == "explicit":
            like = np.full(self.values["mask"].shape, NAN, np.uint16)
            address = self._memory.upload(like)
            self._outputs["dmask"] = address, like
            self._set("dmask", address, like.shape)

    def _optional(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Optional fp32 outputs of the call, and their shapes."""
        p = self.call.problem
        if not self.call.whole:
            return
        state = (p.batch, p.heads_q, p.dim_qk, p.dim_v)
        if p.op == "retnet":
            if p.direction == "forward":
                yield "r", (p.batch, p.heads_q, p.seqlen_q)
        elif p.direction == "forward":
            yield "final_state", state
        else:
            yield "dinitial_state", state
            yield "dlog2_gamma", (p.batch, p.heads_q)

    def _upload(self, name: str, values: Floats) -> None:
        self.values[name] = values
        setattr(self.params, name, self._memory.upload(values))


def run(
    kernel: loader.LoadedKernel, call: RetentionCall, memory: Memory, seed: int = 0
) -> list[str]:
    """The errors of one launch."""
    reference = REFERENCES[call.problem.op, call.problem.direction]
    return errors_of(kernel, RetentionLaunch(call, memory, seed), memory, reference)
