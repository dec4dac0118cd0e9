"""The shapes that retention is verified on in all its forms and in its gradients: a fixed list.

A case is one input. The three forms, which must agree, and the backward pass run on it, so each padded class, dtype and
copy width costs four builds, which all lengths, decays and layouts share.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from attention_autotuner.arch import Policy, resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import DType, Form, Problem
from attention_autotuner.reference import default_log2_gamma

from .cases import GRADIENTS, HEADS, LAYOUTS, Layout

Dims = tuple[int, int]
Decay = Literal["default", "mixed"]

RETENTION_FORMS: tuple[Form, ...] = ("parallel", "chunkwise", "recurrent")
GAMMAS = (1e-3, 0.3, 0.5, 0.97, 1 - 2**-12, 1.0)
# Below, at and above every chunk size, and super-chunks of up to 2048 tokens.
LENGTHS = (
    1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 127, 128, 129, 191, 193, 255, 256, 257,
    301, 383, 511, 512, 513, 641, 1023, 1024, 1025, 1537, 2047, 2049, 4099,
)  # fmt: skip
SCALES = (None, None, None, 0.3, -0.125, 1.0)
MAX_WORK = 2**23  # batch * heads * tokens * dim_v of one case: bounds the reference's time
FULL = Problem(
    op="retention", causal=True, batch=4, heads_q=16, heads_kv=16, seqlen_q=1024, seqlen_k=1024
)  # enough heads for every SM
FEW = replace(FULL, batch=1, heads_q=2, heads_kv=2, seqlen_q=16384, seqlen_k=16384)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that share their four kernels.

    Attributes:
        dims: (dim_qk, dim_v) pairs of one padded class.
        dtype: dtype of q, k and v.
        count: number of cases.
        like: the problem whose default kernels serve the group, apart from dims and dtype: few heads need super-chunks.
        narrow: tensors are unaligned.
        policy: name of the policy whose defaults run; empty for that of the present GPU.
    """

    dims: tuple[Dims, ...]
    dtype: DType = "fp16"
    count: int = 18
    like: Problem = FULL
    narrow: bool = False
    policy: str = ""


GROUPS: tuple[Group, ...] = (
    Group(dims=((64, 64), (56, 64), (64, 56)), count=26),
    Group(dims=((64, 64), (56, 56)), dtype="bf16", like=FEW, count=22),
    Group(dims=((16, 16), (8, 16), (16, 8)), like=FEW),
    Group(dims=((40, 72), (40, 80), (48, 72))),
    Group(dims=((96, 112), (96, 104), (88, 112)), dtype="bf16"),
    Group(dims=((128, 128), (120, 128)), like=FEW, count=22),
    Group(dims=((192, 192), (184, 192)), count=6),
    Group(dims=((256, 512), (248, 504)), count=12),
    Group(dims=((256, 512), (256, 504)), dtype="bf16", like=FEW, count=10),
    Group(dims=((64, 64), (56, 64)), narrow=True, count=10),
    Group(dims=((48, 80), (40, 80)), dtype="bf16", narrow=True, like=FEW, count=8),
    Group(dims=((256, 512),), policy="A100", like=FEW, count=3),
    Group(dims=((128, 128),), policy="RTX4090", count=4),
    Group(dims=((256, 512),), policy="RTX4090", like=FEW, count=3),
)


@dataclass(frozen=True, kw_only=True)
class RetentionCase:
    """One input of retention.

    Attributes:
        problem: forward, of any form, or backward.
        like: the problem whose default kernels serve the case, apart from form and direction.
        gammas: decay of every head; "default": the operation's defaults; "mixed": those of :data:`GAMMAS` in turn.
        scale: None is ``1 / sqrt(dim_qk)``.
        inputs: memory layout of q, k and v.
        output: memory layout of the outputs.
        gradient: memory layout of the gradient of o.
        initial: the case has an initial state and wants its gradient.
        final: the case wants the final state, which has a gradient.
        dgamma: the case wants the gradient of gamma.
        bias: means of k and v; the state grows by their product with every token.
        shrink: binary orders by which v must be smaller for the eager formula to stay within fp16.
        policy: name of the policy whose default kernels run; empty for that of the present GPU.
    """

    problem: Problem
    like: Problem = FULL
    gammas: Decay | float = "mixed"
    scale: float | None = None
    inputs: Layout = "dense"
    output: Layout = "dense"
    gradient: Layout = "dense"
    initial: bool = True
    final: bool = True
    dgamma: bool = True
    bias: tuple[float, float] = (0.0, 0.0)
    shrink: int = 0
    policy: str = ""

    @property
    def name(self) -> str:
        """The test id."""
        words = [word for word in self.problem.describe().split() if word not in ("causal",)][1:]
        words += [self.inputs, self.output, f"dout={self.gradient}", f"gamma={self.gammas}"]
        words += [f"scale={self.scale}", *(["biased"] if any(self.bias) else [])]
        words += [name for name in ("initial", "final", "dgamma") if getattr(self, name)]
        return "-".join([*words, *([self.policy] if self.policy else [])])

    @property
    def true_scale(self) -> float:
        """The scale as a number."""
        return float(self.problem.dim_qk**-0.5) if self.scale is None else self.scale

    def log2_gamma(self) -> torch.Tensor:
        """Binary logarithm of every head's decay, as kernels read it: fp32 ``[heads_q]``."""
        heads = self.problem.heads_q
        if self.gammas == "default":
            return default_log2_gamma(heads).float()
        values: Sequence[float] = GAMMAS if self.gammas == "mixed" else (float(self.gammas),)
        picked = [values[head % len(values)] for head in range(heads)]
        return torch.tensor(picked, dtype=torch.float64).log2().float()

    def forward(self, form: Form) -> RetentionCase:
        """The same input for a form."""
        return replace(self, problem=replace(self.problem, direction="forward", form=form))

    def backward(self) -> RetentionCase:
        """The same input for the backward pass."""
        return replace(self, problem=replace(self.problem, direction="backward", form="auto"))

    def candidate(self, present: Policy) -> Candidate:
        """The kernel of the case: one per group, direction and form.

        Args:
            present: policy of the present GPU.
        """
        p = self.problem
        policy = resolve(self.policy) if self.policy else present
        return policy.default(
            replace(
                self.like,
                direction=p.direction,
                form=p.form,
                dtype=p.dtype,
                dim_qk=p.padded_dim_qk,
                dim_v=p.padded_dim_v,
                alignment_bytes=p.alignment_bytes,
            )
        )

    def kernels_of(self, present: Policy) -> list[Candidate]:
        """The kernels of all forms and of the backward pass."""
        every = [*(self.forward(form) for form in RETENTION_FORMS), self.backward()]
        return [case.candidate(present) for case in every]


def make_cases(seed: int = 0) -> list[RetentionCase]:
    """The whole list, in which no problem occurs twice."""
    source = random.Random(seed)
    cases: dict[Problem, RetentionCase] = {}
    for group in GROUPS:
        wanted = len(cases) + group.count
        for number in range(10 * group.count):
            case = _case(source, group, number)
            cases.setdefault(replace(case.problem, form="auto"), case)
            if len(cases) == wanted:
                break
    return [*cases.values(), *_biased()]


def _case(source: random.Random, group: Group, number: int) -> RetentionCase:
    dims = group.dims[number % len(group.dims)]
    # Every length once before any is repeated, starting at another place in each group.
    seqlen = LENGTHS[(7 * number + 5 * len(group.dims) + dims[1]) % len(LENGTHS)]
    heads_q, heads_kv = source.choice(HEADS)
    batch = source.choice((1, 2, 3))
    while batch * heads_q * seqlen * max(dims) > MAX_WORK:
        if batch > 1:
            batch -= 1
        elif heads_q > 2:
            heads_q, heads_kv = 2, 1
        else:
            seqlen //= 2
    problem = replace(
        group.like,
        dtype=group.dtype,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        dim_qk=dims[0],
        dim_v=dims[1],
        alignment_bytes=2 if group.narrow else 16,
    )
    decays: tuple[Decay | float, ...] = ("default", "mixed", *GAMMAS)
    outputs: tuple[Layout, ...] = ("dense", "transposed", "padded")
    aligned = source.choice(LAYOUTS), source.choice(GRADIENTS)
    inputs, gradient = ("unaligned", "unaligned") if group.narrow else aligned
    return RetentionCase(
        problem=problem,
        like=group.like,
        gammas=decays[number % len(decays)],
        scale=source.choice(SCALES),
        inputs=inputs,  # type: ignore[arg-type]  # literals
        output=source.choice(outputs),
        gradient=gradient,  # type: ignore[arg-type]  # literals
        initial=source.random() < 0.6,
        final=source.random() < 0.7,
        dgamma=source.random() < 0.7,
        policy=group.policy,
    )


# Means with which a state overflows fp16 within a thousand tokens, and a scale that keeps o within fp16.
HEAVY = RetentionCase(
    problem=replace(FULL, batch=1, heads_q=2, heads_kv=1, dim_qk=64, dim_v=64),
    gammas=1.0,
    bias=(6.0, 8.0),
    shrink=8,
    scale=2.0**-12,
)
LONGEST = replace(HEAVY, problem=replace(HEAVY.problem, heads_kv=2, seqlen_q=65536, seqlen_k=65536))


def _biased() -> Iterator[RetentionCase]:
    """Cases with states beyond 65504: gamma of 1 and slightly below, for head dims of 64 and 128."""
    for gamma in (1.0, 1 - 2**-12):
        for dim, dtype, like in ((64, "fp16", FULL), (64, "bf16", FEW), (128, "fp16", FEW)):
            for seqlen in (2049, 4099):
                problem = replace(
                    HEAVY.problem,
                    dtype=dtype,  # type: ignore[arg-type]  # a literal
                    seqlen_q=seqlen,
                    seqlen_k=seqlen,
                    dim_qk=dim,
                    dim_v=dim,
                )
                yield replace(HEAVY, problem=problem, gammas=gamma, like=like)


def builds(cases: Sequence[RetentionCase], present: Policy) -> list[Candidate]:
    """The distinct kernels that cases need, in order of first use."""
    return list(
        dict.fromkeys(candidate for case in cases for candidate in case.kernels_of(present))
    )
