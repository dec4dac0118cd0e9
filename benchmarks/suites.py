"""The problems that are measured: grids of published comparisons and layers of models, each with its source.

A *case* is a forward shape; it is measured in one or more races, each in one or more modes. A suite is what is reported
together. To add a case, add it to its suite below: nothing else names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from attention_autotuner.core.problem import DType, Problem

from .baselines.base import DIRECTION_OF, MODES, Mode
from .contenders import DETERMINISTIC

Races = tuple[tuple[Mode, ...], ...]
INFERENCE: Races = (("forward",),)
TRAINING: Races = (("forward",), ("step",))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of one model or grid.

    Attributes:
        name: unique in its suite; on the command line and in results.
        title: in tables.
        source: where its numbers come from.
        shape: the forward problem.
        races: the modes of each race in which it is measured when no mode is asked for; with more than the forward
            pass it is trained, and may be measured in every mode.
    """

    name: str
    title: str
    source: str
    shape: Problem
    races: Races = INFERENCE

    def measured(self, modes: Sequence[Mode]) -> Races:
        """The races that are meant when some modes, or none, are asked for."""
        if not modes:
            return self.races
        possible = MODES if self.races != INFERENCE else ("forward",)
        return tuple((mode,) for mode in possible if mode in modes)

    def problem(self, mode: Mode, dtype: DType) -> Problem:
        """The problem that is measured in one mode."""
        return replace(self.shape, direction=DIRECTION_OF[mode], dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings of a search.

    Attributes:
        top_k: candidates that a problem adds to its class.
        class_limit: candidates of a class beside the defaults, for each mode; None is no limit.
        seconds: of timing rounds a problem.
    """

    top_k: int = 10
    class_limit: int | None = None
    seconds: float = 3.0


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cases that are reported together.

    Attributes:
        name: on the command line and of the result file.
        title: in tables.
        cases: in the order of the table.
        unit: what a table shows beside the time: ``tflops``, or ``gb_per_s`` where memory is the limit.
        baselines: what it is compared with when no others are asked for; empty for all of its operations.
        inspects: memory and differences of calls are taken beside their times.
        grid: cases are head dims by sequence lengths.
        tuning: of a suite that is tuned: the defaults race, too, and records are confirmed or taken back.
        seconds: of timing rounds a race.
        bars: comparison -> what our speed must reach: a figure of the summary -> its bar.
        dim_bars: the same for every problem of some head dims (dim_qk, dim_v).
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    unit: str = "tflops"
    baselines: tuple[str, ...] = ()
    inspects: bool = False
    grid: bool = False
    tuning: Tuning | None = None
    seconds: float = 0.5
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    dim_bars: Mapping[str, Mapping[tuple[int, int], float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A case in one race and dtype.

    Attributes:
        suite: the suite.
        case: the case.
        modes: how it is measured, all in one race; of one direction.
        problem: what is measured.
    """

    suite: Suite
    case: Case
    modes: tuple[Mode, ...]
    problem: Problem

    @property
    def key(self) -> str:
        """Its name in a result file."""
        return f"{self.case.name} {self.modes[0]} {self.problem.dtype}"


def row_label(problem: Problem) -> str:
    """The table row of a grid that a problem belongs to, e.g. ``d64 causal``."""
    dims = f"d{problem.dim_qk}" + (f"/{problem.dim_v}" if problem.dim_v != problem.dim_qk else "")
    return f"{dims} causal" if problem.causal else dims


def column_label(problem: Problem) -> str:
    """The table column of a grid, e.g. ``512`` or ``4k``."""
    seqlen = problem.seqlen_k
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def shape_label(problem: Problem) -> str:
    """A shape of retention in tables: batch, heads, seqlen and head dims, e.g. ``8, 8, 2048, 256/512``."""
    p = problem
    return f"{p.batch}, {p.heads_q}, {p.seqlen_q}, {p.dim_qk}/{p.dim_v}"


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
RETNET_DIMS = f"{RETNET}; longer sequences and other head dims beside it"
BERT_BASE = "arXiv 1810.04805, sections 3 and A.2: 12 heads of 64, 128 tokens in most steps"
BERT_LARGE = "arXiv 1810.04805, sections 3 and A.2: 16 heads of 64, 512 tokens"
VIT = "arXiv 2010.11929, table 1: 16 heads of 64; 14 x 14 patches and a class token"
CLIP = "arXiv 2103.00020, table 20: 12 heads of 64, 77 tokens, causal"

TOKENS = 16384  # per batch, as in published comparisons of attention kernels
HIDDEN = 2048  # heads times head dim
DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
AUTOGRAD_SEQLEN = 2048  # through autograd, one length of each row of the grid is timed

DECAY: dict[str, Any] = {"op": "retention", "causal": True}
MASKED: dict[str, Any] = {"op": "retnet", "mask": "explicit"}
_SHAPE = re.compile(r"b(\d+) h(\d+)(?:/(\d+))? s(\d+)(?:x(\d+))? d(\d+)(?:/(\d+))?( causal)?")


def shape(text: str, **fields: Any) -> Problem:
    """A forward problem whose shape is written as :meth:`Problem.describe` writes it.

    Raises:
        ValueError: it is not written so.
    """
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no shape, e.g. 'b1 h32/8 s8192 d128 causal'")
    batch, heads, kv, seqlen, keys, dim, dim_v = (int(size or 0) for size in match.groups()[:-1])
    return Problem(
        batch=batch,
        heads_q=heads,
        heads_kv=kv or heads,
        seqlen_q=seqlen,
        seqlen_k=keys or seqlen,
        dim_qk=dim,
        dim_v=dim_v or dim,
        **{"causal": match[8] is not None, **fields},
    )


def _case(
    name: str, title: str, source: str, text: str, races: Races = INFERENCE, **fields: Any
) -> Case:
    return Case(name=name, title=title, source=source, shape=shape(text, **fields), races=races)


def _attention_grid(*modes: Mode) -> tuple[Case, ...]:
    cases = []
    for dim, causal, seqlen in product(DIMS, ("", " causal"), SEQLENS):
        text = f"b{TOKENS // seqlen} h{HIDDEN // dim} s{seqlen} d{dim}{causal}"
        title = f"d{dim}{causal} {column_label(shape(text))}"
        through: tuple[Mode, ...] = ()
        if "step" in modes and seqlen == AUTOGRAD_SEQLEN:
            through = ("autograd",)
        source = FA3_PAPER if dim == max(DIMS) else FA2_PAPER
        cases.append(_case(title.replace(" ", "_"), title, source, text, ((*modes, *through),)))
    return tuple(cases)


def _retention_shapes(texts: Sequence[str], races: Races, **fields: Any) -> tuple[Case, ...]:
    cases = []
    for text in texts:
        name = text.replace(" ", "_").replace("/", "_")
        title = shape_label(shape(text, **fields))
        cases.append(_case(name, title, RETNET_DIMS, text, races, **fields))
    return tuple(cases)


RETNET_SHAPES = _retention_shapes(
    (
        "b8 h8 s2048 d256/512",
        "b4 h8 s4096 d256/512",
        "b8 h8 s2048 d256/256",
        "b8 h16 s2048 d128/128",
        "b8 h16 s2048 d64/64",
    ),
    (("forward",), ("backward",)),
    **MASKED,
)
RETENTION_SHAPES = _retention_shapes(
    (
        "b8 h8 s2048 d256/512",
        "b4 h8 s4096 d256/512",
        "b2 h8 s8192 d256/512",
        "b1 h8 s16384 d256/512",
        "b8 h8 s2048 d256/256",
        "b8 h16 s2048 d128/256",
        "b8 h16 s4096 d128/128",
        "b8 h32 s2048 d64/64",
    ),
    TRAINING,
    **DECAY,
)
MODELS = (
    _case("llama3_8b_8k", "Llama-3 8B, 8k", LLAMA3, "b1 h32/8 s8192 d128 causal", TRAINING),
    _case("llama3_70b_8k", "Llama-3 70B, 8k", LLAMA3, "b1 h64/8 s8192 d128 causal", TRAINING),
    _case("qwen2_5_7b_4k", "Qwen2.5-7B, 4k", QWEN, "b2 h28/4 s4096 d128 causal", TRAINING),
    _case(
        "deepseek_v3_mla_4k",
        "DeepSeek-V3 MLA, 4k",
        DEEPSEEK,
        "b1 h128 s4096 d192/128 causal",
        TRAINING,
    ),
    _case("sdxl_self_4096", "SDXL self-attention, 64 x 64", SDXL, "b2 h10 s4096 d64"),
    _case("sdxl_self_1024", "SDXL self-attention, 32 x 32", SDXL, "b2 h20 s1024 d64"),
    _case("sdxl_cross_1024", "SDXL cross-attention, 32 x 32", SDXL, "b2 h20 s1024x77 d64"),
    _case("flux1_dev_1024", "FLUX.1-dev, 1024 x 1024", FLUX, "b1 h24 s4608 d128"),
    _case("retnet_1_3b", "RetNet 1.3B, decay", RETNET, "b8 h8 s2048 d256/512", TRAINING, **DECAY),
    _case("retnet_6_7b", "RetNet 6.7B, decay", RETNET, "b4 h16 s2048 d256/512", TRAINING, **DECAY),
    _case(
        "retnet_1_3b_masked",
        "RetNet 1.3B, parallel with a mask",
        RETNET,
        "b8 h8 s2048 d256/512",
        TRAINING,
        **MASKED,
    ),
)
"""Prefill or training of language models (causal), and image models (not)."""


def _decode(batch: int, seqlen_q: int, seqlen_k: int, heads: str, model: str) -> Case:
    title = f"{model}, batch {batch}, {seqlen_q} on {seqlen_k // 1024}k"
    name = title.lower().replace(", ", "_").replace(" ", "_").replace("-", "")
    # One row sees every key, so that a mask would say nothing.
    text = f"b{batch} h{heads} s{seqlen_q}x{seqlen_k} d128" + (" causal" if seqlen_q > 1 else "")
    return _case(name, title, f"{LLAMA3}; the later models' context is 128k", text)


DECODE_TITLE = "Decoding: few queries on long keys"
DECODE = tuple(
    _decode(*sizes, heads, model)
    for model, heads in (("Llama-3 8B", "32/8"), ("Llama-3 70B", "64/8"))
    for sizes in ((1, 1, 8192), (16, 1, 8192), (1, 1, 131072), (16, 4, 8192), (16, 16, 8192))
)
PROMPT = "llama3_8b_prompt_256"
SHORT = (
    _case("bert_base_128", "BERT base, 128", BERT_BASE, "b64 h12 s128 d64", TRAINING),
    _case("bert_large_512", "BERT large, 512", BERT_LARGE, "b16 h16 s512 d64", TRAINING),
    _case("vit_large_16", "ViT-L/16, 224 x 224", VIT, "b64 h16 s197 d64", TRAINING),
    _case("clip_text", "CLIP ViT-L/14 text", CLIP, "b64 h12 s77 d64 causal", TRAINING),
    _case(PROMPT, "Llama-3 8B, one prompt of 256", LLAMA3, "b1 h32/8 s256 d128 causal"),
)
_GRADIENT_BARS = {"geometric_mean": 1.05, "min": 0.95}
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            name="attention_forward",
            title="Attention forward",
            cases=_attention_grid("forward"),
            baselines=("sdpa_flash", "sdpa_cudnn"),
            grid=True,
            tuning=Tuning(),
            seconds=3.0,
            bars={"sdpa_flash forward": {"geometric_mean": 1.05, "min": 0.97}},
        ),
        Suite(
            name="attention_backward",
            title="Attention backward and whole steps",
            cases=_attention_grid("backward", "step"),
            baselines=("sdpa_flash", "sdpa_cudnn"),
            grid=True,
            tuning=Tuning(top_k=6, class_limit=12, seconds=0.5),
            seconds=1.5,
            bars={
                "sdpa_flash backward": _GRADIENT_BARS,
                "sdpa_flash step": _GRADIENT_BARS,
                DETERMINISTIC: {"geometric_mean": 1 / 1.35},
            },
        ),
        Suite(
            name="retnet",
            title="Retention with an explicit mask",
            cases=RETNET_SHAPES,
            inspects=True,
            tuning=Tuning(top_k=4, class_limit=5, seconds=0.5),
            seconds=1.5,
            bars={
                "compiled forward": {"geometric_mean": 1.4},
                "compiled backward": {"geometric_mean": 1.1},
            },
            dim_bars={
                "compiled forward": {(256, 512): 0.65, (128, 128): 2.2, (64, 64): 2.2},
                "compiled backward": {(256, 512): 0.45},
            },
        ),
        Suite(
            name="retention",
            title="Retention with decay",
            cases=RETENTION_SHAPES,
            inspects=True,
            tuning=Tuning(top_k=5, class_limit=8, seconds=0.5),
            seconds=1.5,
            bars={
                "fla forward": {"geometric_mean": 1.8, "min": 1.1},
                "fla step": {"geometric_mean": 2.0, "min": 1.1},
            },
        ),
        Suite(name="models", title="Layers of named models", cases=MODELS),
        Suite(name="decode", title=DECODE_TITLE, cases=DECODE, unit="gb_per_s"),
        Suite(name="short", title="Short sequences", cases=SHORT),
    )
}
"""Name -> suite."""


def trials(
    suites: Sequence[str],
    *,
    modes: Sequence[Mode] = (),
    words: Sequence[str] = (),
    dims: Sequence[int] = (),
    dtype: DType = "fp16",
) -> list[Trial]:
    """The trials of some suites, suite by suite.

    Args:
        suites: names.
        modes: only these, where a case can be measured so; without any, each case is measured as it usually is.
        words: each must be in the case's name or be a word of the problem's description.
        dims: ``dim_qk`` must be one of these; without any, all are taken.
        dtype: of every tensor.

    Raises:
        ValueError: a suite is unknown, or nothing is left.
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise ValueError(f"no suite is named {unknown[0]!r}; there are {', '.join(SUITES)}")
    wanted = [
        Trial(suite=SUITES[name], case=case, modes=race, problem=problem)
        for name in suites
        for case in SUITES[name].cases
        for race in case.measured(modes)
        for problem in (case.problem(race[0], dtype),)
        if all(word in case.name or word in problem.describe().split() for word in words)
        and (not dims or problem.dim_qk in dims)
    ]
    if not wanted:
        described = " ".join([*words, *(f"dim {dim}" for dim in dims)])
        raise ValueError(
            f"no case of {', '.join(suites)} is described by {described!r}"
            + (f" and is measured {' or '.join(modes)}" if modes else "")
        )
    return wanted
