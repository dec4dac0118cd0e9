"""The calls that masked, normalised retention is verified on, forward and backward: a fixed list.

Each padded class, dtype and copy width costs two builds forward and two backward, for an explicit mask and for a decay.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from attention_autotuner.arch import Policy, resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Direction, DType, Problem

from .cases import GRADIENTS, HEADS, LAYOUTS, Layout
from .retention_cases import GAMMAS

Dims = tuple[int, int]
Values = Literal["normal", "negative", "zero_rows", "sparse", "ones", "retnet", "large", "small"]

VALUES: tuple[Values, ...] = (
    "normal", "retnet", "zero_rows", "ones", "negative", "large", "sparse", "small",
)  # fmt: skip  # of an explicit mask
LENGTHS = (
    1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 40, 63, 64, 65, 96, 127, 128, 129, 191, 200, 255, 256, 257,
    301, 391, 512, 513, 641, 1023, 1024,
)  # fmt: skip
SCALES = (1.0, 1.0, None, 0.3, -0.125, 0.0, 8.0)
MAX_SCALE = 2.0  # of heads wider than 64: dmask and o stay within fp16
CLAMPS = (None, None, None, 3.3, 50000.0)
MAX_SCORES = 2**22  # of one case: bounds the reference's memory and time
SHRINK = (
    8  # binary orders by which the eager formula's scale is smaller where X would overflow fp16
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that share their kernels.

    Attributes:
        dims: (dim_qk, dim_v) pairs of one padded class.
        dtype: dtype of every 16-bit tensor.
        count: number of cases with a mask; there are half as many with a decay.
        narrow: tensors are unaligned, or the mask has an odd number of columns.
        policy: name of the policy whose defaults run; empty for that of the present GPU.
    """

    dims: tuple[Dims, ...]
    dtype: DType = "fp16"
    count: int = 16
    narrow: bool = False
    policy: str = ""


GROUPS: tuple[Group, ...] = (
    Group(dims=((64, 64), (56, 64), (64, 56))),
    Group(dims=((128, 128), (120, 128)), dtype="bf16"),
    Group(dims=((40, 72), (48, 80))),
    Group(dims=((256, 512), (248, 504)), count=12),
    Group(dims=((96, 112), (96, 104)), dtype="bf16", count=10),
    Group(dims=((64, 64), (56, 64)), narrow=True),
    Group(dims=((192, 192), (192, 184)), narrow=True, dtype="bf16", count=10),
    Group(dims=((256, 512),), policy="A100", count=3),
    Group(dims=((128, 128),), policy="RTX4090", count=4),
    Group(dims=((256, 512),), policy="RTX4090", count=3),
)


@dataclass(frozen=True, kw_only=True)
class RetnetCase:
    """One call.

    Attributes:
        problem: forward or backward, with an explicit mask or a decay.
        values: kind of values of an explicit mask. "large" takes X beyond fp16, "small" keeps the rows' sums below 1,
            "sparse" is mostly zero, "retnet" is powers of gamma over the root of their sum.
        shared: one mask for all heads.
        gamma: the decay of every head; None for those of :data:`GAMMAS` in turn.
        scale: None is ``1 / sqrt(dim_qk)``.
        normalize: rows are divided by r.
        r_clamp_max: upper limit of r.
        r_grad: backward: the gradient flows through r.
        dmask: backward: the case wants the gradient of the mask.
        r: forward: the case wants r.
        inputs: memory layout of q, k, v and the mask.
        output: memory layout of the outputs.
        gradient: memory layout of the gradient of o.
        policy: name of the policy whose default kernel runs; empty for that of the present GPU.
        kernel: name of the kernel whose first candidate runs instead, where the policy offers one.
    """

    problem: Problem
    values: Values = "normal"
    shared: bool = False
    gamma: float | None = None
    scale: float | None = 1.0
    normalize: bool = True
    r_clamp_max: float | None = None
    r_grad: bool = False
    dmask: bool = True
    r: bool = True
    inputs: Layout = "dense"
    output: Layout = "dense"
    gradient: Layout = "dense"
    policy: str = ""
    kernel: str = ""

    @property
    def explicit(self) -> bool:
        """True when the mask is a tensor in memory."""
        return self.problem.mask == "explicit"

    @property
    def name(self) -> str:
        """The test id."""
        words = self.problem.describe().split()[2:]
        words += [self.values] if self.explicit else [f"gamma={self.gamma}"]
        words += [self.inputs, self.output, f"scale={self.scale}", f"clamp={self.r_clamp_max}"]
        if self.problem.direction == "backward":
            words.append(f"dout={self.gradient}")
        words += [
            flag for flag in ("shared", "normalize", "r_grad", "dmask", "r") if self.has(flag)
        ]
        return "-".join([*words, *filter(None, (self.policy, self.kernel))])

    def has(self, flag: str) -> bool:
        """True when a flag is set and applies to this case."""
        applies = {
            "shared": self.explicit,
            "dmask": self.explicit and self.problem.direction == "backward",
            "r_grad": self.normalize and self.problem.direction == "backward",
            "r": self.problem.direction == "forward",
        }
        return bool(getattr(self, flag)) and applies.get(flag, True)

    @property
    def true_scale(self) -> float:
        """The scale as a number."""
        return float(self.problem.dim_qk**-0.5) if self.scale is None else self.scale

    @property
    def shrink(self) -> int:
        """Binary orders by which X must be smaller for the eager formula to stay within fp16."""
        large = self.explicit and self.values == "large" and self.true_scale != 0.0
        return SHRINK if large else 0

    def log2_gamma(self) -> torch.Tensor:
        """Binary logarithm of every head's decay, as kernels read it: fp32 ``[heads_q]``."""
        values = GAMMAS if self.gamma is None else (self.gamma,)
        picked = [values[head % len(values)] for head in range(self.problem.heads_q)]
        return torch.tensor(picked, dtype=torch.float64).log2().float()

    def candidate(self, present: Policy) -> Candidate:
        """The kernel of the case: one per class, dtype, copy width and kind of mask.

        Args:
            present: policy of the present GPU.
        """
        p = self.problem
        policy = resolve(self.policy) if self.policy else present
        like = Problem(
            op="retnet",
            direction=p.direction,
            mask=p.mask,
            causal=p.mask == "decay" or (p.padded_dim_qk + p.padded_dim_v) % 48 == 32,
            dtype=p.dtype,
            dim_qk=p.padded_dim_qk,
            dim_v=p.padded_dim_v,
            alignment_bytes=p.alignment_bytes,
            deterministic=p.deterministic,
        )
        named = (c for c in policy.legal(like) if c.kernel == self.kernel) if self.kernel else ()
        return next(iter(named), None) or policy.default(like)


def make_cases(direction: Direction = "forward", seed: int = 0) -> list[RetnetCase]:
    """The whole list of a direction."""
    source = random.Random(seed)
    cases: dict[RetnetCase, None] = {}
    for place, group in enumerate(GROUPS):
        for number in range(group.count):
            cases[_explicit(source, group, number, direction, place)] = None
        for number in range(group.count // 2):
            cases[_decayed(source, group, number, direction, place)] = None
    return list(cases)


def _explicit(
    source: random.Random, group: Group, number: int, direction: Direction, place: int
) -> RetnetCase:
    base = _common(source, group, number, direction, place)
    # The mask of 16-byte rows has a multiple of 8 columns.
    seqlen_k = source.choice([n for n in LENGTHS if group.narrow or n % 8 == 0])
    seqlen_q = source.choice(LENGTHS)
    if source.random() < 0.3:
        seqlen_q = seqlen_k
    values = VALUES[(number + place) % len(VALUES)]
    case = replace(
        base,
        problem=_bounded(
            replace(
                base.problem,
                mask="explicit",
                causal=number % 3 == 0,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
            )
        ),
        values=values,
        shared=source.random() < 0.4,
        dmask=source.random() < 0.7,
    )
    if values == "large":  # o would overflow without r, or with a small one
        case = replace(case, normalize=True, r_clamp_max=None)
    return case


def _decayed(
    source: random.Random, group: Group, number: int, direction: Direction, place: int
) -> RetnetCase:
    base = _common(source, group, number, direction, place)
    seqlen_q, seqlen_k = source.choice(LENGTHS), source.choice(LENGTHS)
    if source.random() < 0.5:
        seqlen_q = seqlen_k
    problem = replace(base.problem, mask="decay", causal=True, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    gammas = (None, *GAMMAS)
    return replace(base, problem=_bounded(problem), gamma=gammas[(number + place) % len(gammas)])


def _common(
    source: random.Random, group: Group, number: int, direction: Direction, place: int
) -> RetnetCase:
    """A random case of the fields that explicit masks and decays share."""
    dims = group.dims[number % len(group.dims)]
    heads_q, heads_kv = source.choice(HEADS)
    backward = direction == "backward"
    outputs: tuple[Layout, ...] = ("dense", "transposed", "padded")
    aligned = source.choice(LAYOUTS), source.choice(GRADIENTS)
    inputs, gradient = ("unaligned", "unaligned") if group.narrow else aligned
    normalize, scale = source.random() < 0.75, source.choice(SCALES)
    if scale is not None and dims[0] > 64:
        scale = min(scale, MAX_SCALE)
    return RetnetCase(
        problem=Problem(
            op="retnet",
            direction=direction,
            mask="explicit",
            dtype=group.dtype,
            batch=source.choice((1, 2, 3)),
            heads_q=heads_q,
            heads_kv=heads_kv,
            dim_qk=dims[0],
            dim_v=dims[1],
            alignment_bytes=2 if group.narrow else 16,
            deterministic=backward and place % 2 == 0,
        ),
        scale=scale,
        normalize=normalize,
        r_clamp_max=source.choice(CLAMPS) if normalize else None,
        r_grad=normalize and source.random() < 0.5,
        r=source.random() < 0.7,
        inputs=inputs,  # type: ignore[arg-type]  # literals
        output=source.choice(outputs),
        gradient=gradient,  # type: ignore[arg-type]  # literals
        policy=group.policy,
    )


def _bounded(problem: Problem) -> Problem:
    """The problem, made smaller until it has at most :data:`MAX_SCORES` scores."""
    p = problem
    while p.batch * p.heads_q * p.seqlen_q * p.seqlen_k > MAX_SCORES:
        if p.batch > 1:
            p = replace(p, batch=p.batch - 1)
        elif p.heads_q > 2:
            p = replace(p, heads_q=2, heads_kv=1)
        else:
            p = replace(p, seqlen_q=max(1, p.seqlen_q // 2))
    return p


def builds(cases: Sequence[RetnetCase], present: Policy) -> list[Candidate]:
    """The distinct kernels that cases need, in order of first use."""
    return list(dict.fromkeys(case.candidate(present) for case in cases))


def every_case() -> Iterator[RetnetCase]:
    """The cases of both directions."""
    yield from make_cases("forward")
    yield from make_cases("backward")
