"""What users run: named cases of published grids and models, each with the source of its numbers.

A *case* is a forward shape; it is measured in one or more ways. A suite is what is reported together. To add a case,
add it to its suite below: nothing else names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attention_autotuner.core.problem import DType, Problem

from .cases import GRIDS, column_label, row_label
from .implementations import DIRECTION_OF, WAYS, Way

TRAINING: tuple[Way, ...] = ("forward", "step")
INFERENCE: tuple[Way, ...] = ("forward",)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of one model or grid.

    Attributes:
        name: unique in its suite; on the command line and in results.
        title: in tables.
        source: where its numbers come from.
        shape: the forward problem.
        ways: how it is measured when nothing else is asked; with more than the forward pass it is trained, and may be
            measured in every way.
    """

    name: str
    title: str
    source: str
    shape: Problem
    ways: tuple[Way, ...] = INFERENCE

    def measured(self, asked: Sequence[Way]) -> tuple[Way, ...]:
        """The ways that are meant when some, or none, are asked for."""
        possible = WAYS if len(self.ways) > 1 else INFERENCE
        return tuple(way for way in possible if way in (asked or self.ways))

    def problem(self, way: Way, dtype: DType) -> Problem:
        """What is measured in one way."""
        return replace(self.shape, direction=DIRECTION_OF[way], dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cases that are reported together.

    Attributes:
        name: on the command line and of the result file.
        title: in tables.
        unit: what a table shows beside the time: ``tflops``, or ``gb_per_s`` where memory is the limit.
        cases: in the order of the table.
    """

    name: str
    title: str
    unit: str
    cases: tuple[Case, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A case in one way and dtype.

    Attributes:
        suite: the suite's name.
        case: the case.
        way: how it is measured.
        problem: what is measured.
    """

    suite: str
    case: Case
    way: Way
    problem: Problem

    @property
    def key(self) -> str:
        """What names it in a result file."""
        return f"{self.case.name} {self.way} {self.problem.dtype}"


FA2_PAPER = "arXiv 2307.08691, section 4.1: 16k tokens, hidden size 2048, head dims 64 and 128"
FA3_PAPER = "arXiv 2407.08608, section 4.1: the same with head dim 256"
LLAMA3 = "arXiv 2407.21783, table 3"
QWEN = "arXiv 2412.15115, table 1, and the model's config.json"
DEEPSEEK = "arXiv 2412.19437, section 4.2: 128 heads of 128 and 64 rotary dims, sequences of 4k"
SDXL = "arXiv 2307.01952, table 1: 1024 x 1024 pixels, heads of 64, with and without guidance"
FLUX = (
    "the hidden size 3072 and 24 heads of FLUX.1-dev's published model; 64 x 64 patches, 512 words"
)
RETNET = "arXiv 2307.08621, table 2 and section 3.1: heads of 256, values twice as wide, 2k tokens"


def _shape(
    batch: int,
    heads: int | tuple[int, int],
    seqlen: int | tuple[int, int],
    dims: int | tuple[int, int],
    **fields: Any,
) -> Problem:
    """A forward problem; pairs are of q and of k and v, or of q and k and of v."""
    heads_q, heads_kv = heads if isinstance(heads, tuple) else (heads, heads)
    seqlen_q, seqlen_k = seqlen if isinstance(seqlen, tuple) else (seqlen, seqlen)
    dim_qk, dim_v = dims if isinstance(dims, tuple) else (dims, dims)
    return Problem(
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dim_qk=dim_qk,
        dim_v=dim_v,
        **fields,
    )


def _grid(dims: Sequence[int], source: str) -> tuple[Case, ...]:
    return tuple(
        Case(
            name=f"{row_label(p)} {column_label(p)}".replace(" ", "_"),
            title=f"{row_label(p)} {column_label(p)}",
            source=source,
            shape=p,
            ways=("forward", "backward"),
        )
        for p in GRIDS["attention_forward"].problems
        if p.dim_qk in dims
    )


MODELS = (
    Case(
        name="llama3_8b_8k",
        title="Llama-3 8B, 8k",
        source=LLAMA3,
        shape=_shape(1, (32, 8), 8192, 128, causal=True),
        ways=TRAINING,
    ),
    Case(
        name="llama3_70b_8k",
        title="Llama-3 70B, 8k",
        source=LLAMA3,
        shape=_shape(1, (64, 8), 8192, 128, causal=True),
        ways=TRAINING,
    ),
    Case(
        name="qwen2_5_7b_4k",
        title="Qwen2.5-7B, 4k",
        source=QWEN,
        shape=_shape(2, (28, 4), 4096, 128, causal=True),
        ways=TRAINING,
    ),
    Case(
        name="deepseek_v3_mla_4k",
        title="DeepSeek-V3 MLA, 4k",
        source=DEEPSEEK,
        shape=_shape(1, 128, 4096, (192, 128), causal=True),
        ways=TRAINING,
    ),
    Case(
        name="sdxl_self_4096",
        title="SDXL self-attention, 64 x 64",
        source=SDXL,
        shape=_shape(2, 10, 4096, 64),
    ),
    Case(
        name="sdxl_self_1024",
        title="SDXL self-attention, 32 x 32",
        source=SDXL,
        shape=_shape(2, 20, 1024, 64),
    ),
    Case(
        name="sdxl_cross_1024",
        title="SDXL cross-attention, 32 x 32",
        source=SDXL,
        shape=_shape(2, 20, (1024, 77), 64),
    ),
    Case(
        name="flux1_dev_1024",
        title="FLUX.1-dev, 1024 x 1024",
        source=FLUX,
        shape=_shape(1, 24, 4096 + 512, 128),
    ),
    Case(
        name="retnet_1_3b",
        title="RetNet 1.3B, decay",
        source=RETNET,
        shape=_shape(8, 8, 2048, (256, 512), op="retention", causal=True),
        ways=TRAINING,
    ),
    Case(
        name="retnet_6_7b",
        title="RetNet 6.7B, decay",
        source=RETNET,
        shape=_shape(4, 16, 2048, (256, 512), op="retention", causal=True),
        ways=TRAINING,
    ),
    Case(
        name="retnet_1_3b_masked",
        title="RetNet 1.3B, parallel with a mask",
        source=RETNET,
        shape=_shape(8, 8, 2048, (256, 512), op="retnet", mask="explicit"),
        ways=TRAINING,
    ),
)
"""Prefill or training of language models (causal), and image models (not)."""


def _decode(batch: int, seqlen_q: int, seqlen_k: int, heads: tuple[int, int], model: str) -> Case:
    # One row sees every key, so that a mask would say nothing.
    words = f"{model}, batch {batch}, {seqlen_q} on {seqlen_k // 1024}k"
    return Case(
        name=words.lower().replace(", ", "_").replace(" ", "_").replace("-", ""),
        title=words,
        source=f"{LLAMA3}; the later models' context is 128k",
        shape=_shape(batch, heads, (seqlen_q, seqlen_k), 128, causal=seqlen_q > 1),
    )


DECODE = tuple(
    _decode(batch, seqlen_q, seqlen_k, heads, model)
    for model, heads in (("Llama-3 8B", (32, 8)), ("Llama-3 70B", (64, 8)))
    for batch, seqlen_q, seqlen_k in (
        (1, 1, 8192),
        (16, 1, 8192),
        (1, 1, 131072),
        (16, 4, 8192),
        (16, 16, 8192),
    )
)
SHORT = (
    Case(
        name="bert_base_128",
        title="BERT base, 128",
        source="arXiv 1810.04805, sections 3 and A.2: 12 heads of 64, 128 tokens in most steps",
        shape=_shape(64, 12, 128, 64),
        ways=TRAINING,
    ),
    Case(
        name="bert_large_512",
        title="BERT large, 512",
        source="arXiv 1810.04805, sections 3 and A.2: 16 heads of 64, 512 tokens",
        shape=_shape(16, 16, 512, 64),
        ways=TRAINING,
    ),
    Case(
        name="vit_large_16",
        title="ViT-L/16, 224 x 224",
        source="arXiv 2010.11929, table 1: 16 heads of 64; 14 x 14 patches and a class token",
        shape=_shape(64, 16, 197, 64),
        ways=TRAINING,
    ),
    Case(
        name="clip_text",
        title="CLIP ViT-L/14 text",
        source="arXiv 2103.00020, table 20: 12 heads of 64, 77 tokens, causal",
        shape=_shape(64, 12, 77, 64, causal=True),
        ways=TRAINING,
    ),
    Case(
        name="llama3_8b_prompt_256",
        title="Llama-3 8B, one prompt of 256",
        source=LLAMA3,
        shape=_shape(1, (32, 8), 256, 128, causal=True),
    ),
)
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            name="paper",
            title="The grid of published comparisons",
            unit="tflops",
            cases=_grid((64, 128), FA2_PAPER),
        ),
        Suite(
            name="paper_d256",
            title="The same grid with head dim 256",
            unit="tflops",
            cases=_grid((256,), FA3_PAPER),
        ),
        Suite(name="models", title="Layers of named models", unit="tflops", cases=MODELS),
        Suite(
            name="decode",
            title="Decoding: few queries on long keys",
            unit="gb_per_s",
            cases=DECODE,
        ),
        Suite(name="short", title="Short sequences", unit="tflops", cases=SHORT),
    )
}
"""Name -> suite."""


def trials(
    suites: Sequence[str], *, ways: Sequence[Way] = (), words: str = "", dtype: DType = "fp16"
) -> list[Trial]:
    """What is measured, suite by suite.

    Args:
        suites: names.
        ways: only these, where a case can be measured so; none given takes what each case is usually measured in.
        words: what must be in a case's name.
        dtype: of every tensor.

    Raises:
        ValueError: a suite is unknown, or nothing is left.
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise ValueError(f"no suite is named {unknown[0]!r}; there are {', '.join(SUITES)}")
    found = [
        Trial(suite=name, case=case, way=way, problem=case.problem(way, dtype))
        for name in suites
        for case in SUITES[name].cases
        if words in case.name
        for way in case.measured(ways)
    ]
    if not found:
        raise ValueError(
            f"no case of {', '.join(suites)} has {words!r} in its name"
            + (f" and is measured {' or '.join(ways)}" if ways else "")
        )
    return found
