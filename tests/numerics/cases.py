"""The shapes that attention is verified on: a fixed list per direction, in a fixed order.

Every padded class of head dims has one kernel per dtype and copy width, and that kernel serves all masks and all true
dims of its class, so hundreds of shapes need a few dozen builds. Backward kernels are the defaults of deterministic
mode for bf16 and a third of the classes, and those of the other mode for the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attention_autotuner.arch import Policy, resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Direction, DType, Problem

Layout = Literal[
    "dense", "transposed", "padded", "batch_broadcast", "heads_broadcast", "broadcast", "unaligned"
]
Dims = tuple[int, int]
Mask = Literal["none", "bottom_right", "top_left"]

# (dim_qk, dim_v) pairs of one padded class each.
CLASSES: tuple[tuple[Dims, ...], ...] = (
    ((64, 64), (56, 64), (64, 56), (56, 56)),
    ((128, 128), (120, 120), (128, 120)),
    ((8, 8), (16, 16), (8, 16), (16, 8)),
    ((80, 80), (72, 72), (72, 80)),
    ((256, 256), (248, 248), (256, 248)),
    ((40, 40), (48, 48), (40, 48)),
    ((96, 96), (88, 96)),
    ((112, 112), (104, 112)),
    ((128, 256), (120, 248)),
    ((192, 128), (184, 128)),
    ((256, 64), (256, 56)),
    ((256, 512), (248, 504)),
    ((32, 32), (24, 24)),
    ((160, 160), (152, 160)),
    ((192, 192), (192, 184)),
    ((224, 224), (216, 224)),
    ((64, 128), (56, 120)),
    ((48, 16), (40, 8)),
    ((144, 80), (136, 72)),
    ((32, 256), (24, 248)),
    ((96, 192), (88, 184)),
    ((16, 64), (8, 56)),
)
BF16: tuple[Dims, ...] = (
    (64, 64), (128, 128), (16, 16), (80, 80), (256, 256), (48, 48), (192, 128), (256, 512),
)  # fmt: skip  # padded classes that have a kernel for bf16 too
NARROW: tuple[tuple[Dims, DType], ...] = (
    ((64, 64), "fp16"), ((128, 128), "bf16"), ((80, 80), "fp16"), ((256, 256), "bf16"),
)  # fmt: skip  # padded classes that have a kernel for unaligned tensors
OTHER_POLICIES: tuple[tuple[str, Dims], ...] = (
    ("A100", (128, 128)), ("RTX4090", (192, 128)), ("A100", (256, 256)), ("A100", (256, 512)),
    ("RTX4090", (128, 128)), ("RTX4090", (256, 256)), ("RTX4090", (256, 512)),
)  # fmt: skip  # policies whose picks run on the present GPU, and padded classes
FORWARD_ONLY = 2  # the first of these run forward only: backward is limited to few builds

LENGTHS = (
    1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 33, 47, 63, 64, 65, 77, 95, 97, 127, 128, 129, 143, 191,
    193, 211, 255, 257, 301, 383, 391, 449, 511, 513, 641, 777, 1023, 1025, 1537, 2047, 2049, 3001,
    4095, 4097, 4099,
)  # fmt: skip
EXTREMES: tuple[tuple[int, int, Mask], ...] = (
    (1, 1, "bottom_right"), (1, 4099, "none"), (4099, 1, "bottom_right"), (4099, 1, "top_left"),
    (4099, 4099, "bottom_right"), (33, 4099, "bottom_right"), (4099, 33, "bottom_right"),
    (2049, 2047, "top_left"),
)  # fmt: skip
HEADS = ((1, 1), (2, 2), (4, 2), (6, 1), (8, 2), (3, 3), (5, 5), (12, 4))
MASKS: tuple[Mask, ...] = ("none", "bottom_right", "top_left")
SCALES = (None, 0.3, -0.125, 0.0, 1.7, -1.0)
FILLING: dict[str, Any] = {
    "batch": 8, "heads_q": 16, "heads_kv": 16, "seqlen_q": 1024, "seqlen_k": 1024,
}  # fmt: skip  # sizes of which a GPU has many tiles
LARGE_SCALE = 6.0  # nearly one-hot rows; drawn for one backward case of each class
LAYOUTS: tuple[Layout, ...] = (
    "dense", "transposed", "padded", "batch_broadcast", "heads_broadcast",
)  # fmt: skip
GRADIENTS: tuple[Layout, ...] = (
    "dense", "transposed", "padded", "batch_broadcast", "heads_broadcast", "broadcast",
)  # fmt: skip  # memory layouts of the gradient of o
MAX_SCORES = 2**26  # of one case: bounds the reference's memory and time
MAX_BUILDS = 40


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of cases: for a padded class, for its unaligned kernel, and for another policy's pick."""

    per_class: int
    per_narrow: int
    per_other_policy: int


COUNTS: dict[Direction, Counts] = {
    "forward": Counts(per_class=14, per_narrow=7, per_other_policy=3),
    "backward": Counts(per_class=9, per_narrow=5, per_other_policy=3),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        problem: shapes, dtype, mask; its alignment decides the kernel's copy width.
        scale: softmax scale; None is ``1 / sqrt(dim_qk)``.
        inputs: memory layout of q, k and v.
        output: memory layout of the outputs: dense, transposed or padded.
        lse: forward: the LSE is returned; backward: it has a gradient.
        gradient: backward: memory layout of the gradient of o.
        policy: name of the policy whose default kernel runs; empty for that of the present GPU.
    """

    problem: Problem
    scale: float | None = None
    inputs: Layout = "dense"
    output: Layout = "dense"
    lse: bool = True
    gradient: Layout = "dense"
    policy: str = ""

    @property
    def name(self) -> str:
        """The test id."""
        words = self.problem.describe().split()[2:]
        words += [self.inputs, self.output, f"scale={self.scale}", "lse" if self.lse else "no-lse"]
        if self.problem.direction == "backward":
            words.append(f"dout={self.gradient}")
        return "-".join([*words, *([self.policy] if self.policy else [])])

    @property
    def options(self) -> dict[str, Any]:
        """Scale and mask, as keyword arguments of the reference."""
        return {
            "softmax_scale": self.scale,
            "causal": self.problem.causal,
            "causal_alignment": self.problem.causal_alignment,
        }

    def candidate(self, present: Policy) -> Candidate:
        """The kernel of the case: one per class, dtype and copy width, whatever the mask and the true dims.

        Args:
            present: policy of the present GPU.
        """
        p = self.problem
        policy = resolve(self.policy) if self.policy else present
        # The order of a default kernel's tiles follows the problem's mask; all orders must serve all masks. Its family
        # may follow the number of queries.
        causal = (p.padded_dim_qk + p.padded_dim_v) % 48 == 32
        return policy.default(replace(p, causal=causal, causal_alignment="bottom_right", **FILLING))


def padded(dims: Dims) -> Dims:
    """The padded class of true dims."""
    problem = Problem(dim_qk=dims[0], dim_v=dims[1])
    return problem.padded_dim_qk, problem.padded_dim_v


def make_cases(direction: Direction = "forward", seed: int = 0) -> list[Case]:
    """The whole list of a direction."""
    draw = _Draw(direction, seed)
    return [
        *_class_cases(draw),
        *_extreme_cases(draw),
        *_narrow_cases(draw),
        *_policy_cases(draw),
    ]


def _class_cases(draw: _Draw) -> Iterator[Case]:
    for pairs in CLASSES:
        dtypes: tuple[DType, ...] = ("fp16", "bf16") if padded(pairs[0]) in BF16 else ("fp16",)
        for number in range(draw.counts.per_class):
            yield draw.case(pairs[number % len(pairs)], dtypes[number % len(dtypes)], number)


def _extreme_cases(draw: _Draw) -> Iterator[Case]:
    for dims, dtype in (((64, 64), "fp16"), ((128, 128), "bf16"), ((80, 72), "fp16")):
        for number, (seqlen_q, seqlen_k, mask) in enumerate(EXTREMES):
            case = draw.case(dims, dtype, number)  # type: ignore[arg-type]  # a literal
            problem = with_mask(case.problem, mask)
            problem = replace(
                problem, batch=1, heads_q=4, heads_kv=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k
            )
            yield replace(case, problem=problem)


def _narrow_cases(draw: _Draw) -> Iterator[Case]:
    for dims, dtype in NARROW:
        for number in range(draw.counts.per_narrow):
            case = draw.case(dims, dtype, number)
            problem = replace(case.problem, alignment_bytes=2)
            # A kernel for unaligned tensors takes aligned ones too.
            last = number == draw.counts.per_narrow - 1
            inputs: Layout = "transposed" if last else "unaligned"
            gradient: Layout = inputs if draw.direction == "backward" else case.gradient
            yield replace(case, problem=problem, inputs=inputs, gradient=gradient)


def _policy_cases(draw: _Draw) -> Iterator[Case]:
    backward = draw.direction == "backward"
    # One pair less keeps backward within MAX_BUILDS, even where all its kernels differ.
    for place, (policy, dims) in enumerate(OTHER_POLICIES[FORWARD_ONLY if backward else 0 :]):
        for number in range(draw.counts.per_other_policy):
            case = replace(draw.case(dims, "fp16", number), policy=policy)
            if backward:
                problem = replace(case.problem, deterministic=place % 2 == 0)
                case = replace(case, problem=problem)
            yield case


class _Draw:
    """Random cases of a direction, the same ones for the same seed."""

    def __init__(self, direction: Direction, seed: int) -> None:
        self.direction = direction
        self.counts = COUNTS[direction]
        self._source = random.Random(seed)

    def case(self, dims: Dims, dtype: DType, number: int) -> Case:
        """A case whose mask follows from its number and whose other fields are random."""
        case = _random_case(self._source, dims, dtype, number)
        if self.direction == "forward":
            return case
        problem = replace(
            case.problem,
            direction=self.direction,
            deterministic=dtype == "bf16" or case.problem.padded_dim_qk % 48 == 0,
        )
        scale = LARGE_SCALE if number == COUNTS["backward"].per_class - 2 else case.scale
        gradient = self._source.choice(GRADIENTS)
        return replace(case, problem=problem, scale=scale, gradient=gradient)


def _random_case(source: random.Random, dims: Dims, dtype: DType, number: int) -> Case:
    """A random case of the fields that both directions share."""
    seqlen_q, seqlen_k = source.choice(LENGTHS), source.choice(LENGTHS)
    if source.random() < 0.25:
        seqlen_k = seqlen_q
    heads_q, heads_kv = source.choice(HEADS)
    batch = source.choice((1, 2, 3))
    while batch * heads_q * seqlen_q * seqlen_k > MAX_SCORES:
        if batch > 1:
            batch -= 1
        elif heads_q > 2:
            heads_q, heads_kv = 2, 1
        else:
            seqlen_k = source.choice([n for n in LENGTHS if n < seqlen_k])
    problem = Problem(
        dtype=dtype,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dim_qk=dims[0],
        dim_v=dims[1],
    )
    outputs: Sequence[Layout] = ("dense", "transposed", "padded")
    return Case(
        problem=with_mask(problem, MASKS[number % len(MASKS)]),
        scale=source.choice(SCALES),
        inputs=source.choice(LAYOUTS),
        output=source.choice(outputs),
        lse=source.random() < 0.7,
    )


def with_mask(problem: Problem, mask: Mask) -> Problem:
    """The problem under another mask."""
    if mask == "none":
        return replace(problem, causal=False)
    return replace(problem, causal=True, causal_alignment=mask)


def builds(cases: Sequence[Case], present: Policy) -> list[Candidate]:
    """The distinct kernels that cases need, in order of first use."""
    return list(dict.fromkeys(case.candidate(present) for case in cases))
