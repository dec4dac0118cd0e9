"""Tensors of masks of any strides, dtype and place in memory, by kernels of both families on the emulated machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.attention.modified import attention_modified
from attention_autotuner.operations.attention.modified_inputs import (
    ModifiedBackward,
    modifiers_of,
)
from attention_autotuner.operations.shared.tensors import Inputs, Shapes
from attention_autotuner.serving.loader import LoadedKernel
from tests.build.test_score_modifications_builds import KNOBS as SM80
from tests.build.test_wgmma_modifications_builds import KNOBS as SM90
from tests.emulation.build import build as emulated
from tests.emulation.check import check

pytestmark = pytest.mark.build

PROBLEM = Problem(
    batch=2,
    heads_q=2,
    heads_kv=1,
    seqlen_q=90,
    seqlen_k=136,
    dim_qk=32,
    dim_v=32,
    causal=True,
    modifications=("attn_mask",),
)
ROWS, KEYS = PROBLEM.seqlen_q, PROBLEM.seqlen_k
Make = Callable[..., torch.Tensor]  # of random numbers of a shape
MASKS: dict[str, Callable[[Make], torch.Tensor]] = {
    "keys of batch entries": lambda make: make(2, 1, 1, KEYS) > -0.7,
    "queries of heads": lambda make: make(1, 2, ROWS, 1).half(),
    "rows that are apart": lambda make: make(2, 1, ROWS, KEYS + 16)[..., :KEYS].half(),
    "bytes that are apart": lambda make: make(1, 2, ROWS, KEYS + 8)[..., 8:] > -0.7,
    "keys first": lambda make: make(1, 2, KEYS, ROWS).mT,
    "keys first, bytes": lambda make: make(2, 2, KEYS, ROWS).mT > -0.7,
    "not aligned": lambda make: make(2, 2, ROWS, KEYS + 8).bfloat16()[..., 1 : KEYS + 1],
    "every other key": lambda make: make(1, 1, ROWS, 2 * KEYS).half()[..., ::2],
    "fp32": lambda make: make(2, 2, ROWS, KEYS),
    "bf16": lambda make: make(2, 2, ROWS, KEYS).bfloat16(),
}
BROADCAST: dict[str, Callable[[Make], torch.Tensor]] = {  # masks whose gradients are sums
    "of all": lambda make: make(1, 1, ROWS, KEYS).half(),
    "of batch entries": lambda make: make(2, 1, ROWS, KEYS),
    "of heads": lambda make: make(1, 2, ROWS, KEYS).bfloat16(),
    "of keys": lambda make: make(2, 1, 1, KEYS).half(),
    "of queries": lambda make: make(1, 2, ROWS, 1),
    "one number": lambda make: make(1, 1, 1, 1),
    "of pairs": lambda make: make(2, 2, ROWS, KEYS).half(),
}
KNOBS = {**SM80, **SM90}
FORWARD = ("overlap", "turns", "ahead", "shared_rows")
BACKWARD = ("fused", "two_pass", "one_pass", "three_kernels")


GRADIENT, PATCH = "common/attn_mask_gradient.cuh", "score/mask_patch.cuh"
MISTAKES: dict[str, tuple[str, tuple[str, str, str]]] = {  # by the mask that shows them
    "another_split": (
        "of all",
        (
            GRADIENT,
            "total += list.sums[split * elements + place];",
            "total = list.sums[split * elements + place];",
        ),
    ),
    "one_row": ("of keys", (GRADIENT, "if (list.sums_over(List::kQueries)) warp.add_rows();", "")),
    "one_column": (
        "of queries",
        (GRADIENT, "if (list.sums_over(List::kKeys)) warp.add_columns();", ""),
    ),
    "heads_of_another_entry": (
        "of batch entries",
        (GRADIENT, "place.batch = along(list.batch, List::kBatch);", "place.batch = 0;"),
    ),
    "odd_pairs": (
        "of pairs",
        (PATCH, "pairs = !kKeysAreRows && mask.in_pairs && column % 2 == 0;", "pairs = true;"),
    ),
}


@cache
def kernel_of(name: str, folder: Path) -> tuple[Problem, LoadedKernel]:
    direction: Any = "backward" if name in BACKWARD else "forward"
    problem = replace(PROBLEM, direction=direction)
    mistakes = (
        {mistake: how for mistake, (_, how) in MISTAKES.items()} if name == "one_pass" else {}
    )
    return problem, emulated(Candidate.of(problem, KNOBS[name]), folder / f"masks_{name}", mistakes)


class GradientOf(ModifiedBackward):
    """The gradient of a mask, too."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__(lse_gradient=True)
        self._mask = mask

    def output_shapes(self, problem: Problem) -> Shapes:
        shape = (tuple(self._mask.shape), self._mask.dtype)
        return {**super().output_shapes(problem), "dattn_mask": shape}


def with_mask(inputs: Inputs, *, problem: Problem, mask: torch.Tensor) -> tuple[Inputs, Inputs]:
    """The inputs with another mask, and with what the forward makes of them."""
    expanded = mask.expand(problem.batch, problem.heads_q, ROWS, KEYS)
    made = replace(inputs, tensors={**inputs.tensors, "attn_mask": expanded})
    modifiers = modifiers_of(problem, made)
    if "attn_mask_summed" in inputs.scalars:
        modifiers = replace(modifiers, mask_gradient=tuple(mask.shape))
    made = replace(made, scalars={**made.scalars, **modifiers.scalars})
    if problem.direction == "backward":
        o, lse = attention_modified(made.q, made.k, made.v, modifiers=modifiers, causal=True)
        made = replace(made, tensors={**made.tensors, "o": o.to(made.q.dtype), "lse": lse})
    return made, made


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_read_where_they_lie(
    tmp_path_factory: pytest.TempPathFactory, kind: str, name: str
) -> None:
    problem, kernel = kernel_of(name, tmp_path_factory.getbasetemp())
    generator = torch.Generator().manual_seed(3)
    mask = MASKS[kind](lambda *shape: torch.randn(shape, generator=generator))
    adjust = partial(with_mask, problem=problem, mask=mask)
    outcome = check(kernel, [problem], [("random", 1)], adjust=adjust)
    assert outcome.ok, outcome.reason
    if kind == "keys of batch entries":  # that it is read is what others show
        wrong = partial(with_mask, problem=problem, mask=~mask)
        mixed = check(
            kernel,
            [problem],
            [("random", 1)],
            adjust=lambda inputs: (wrong(inputs)[0], adjust(inputs)[0]),
        )
        assert mixed.kind == "wrong", mixed


@pytest.mark.parametrize("name", ["fused", "one_pass"])
@pytest.mark.parametrize("kind", BROADCAST)
def test_gradients_are_summed_where_masks_are_broadcast(
    tmp_path_factory: pytest.TempPathFactory, kind: str, name: str
) -> None:
    outcome = outcome_of_gradients(kind, name, tmp_path_factory)
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(tmp_path_factory: pytest.TempPathFactory, mistake: str) -> None:
    outcome = outcome_of_gradients(MISTAKES[mistake][0], "one_pass", tmp_path_factory, mistake)
    assert outcome.kind == "wrong", outcome


def outcome_of_gradients(
    kind: str, name: str, tmp_path_factory: pytest.TempPathFactory, mistake: str = ""
) -> Outcome:
    problem, kernel = kernel_of(name, tmp_path_factory.getbasetemp())
    generator = torch.Generator().manual_seed(4)
    mask = BROADCAST[kind](lambda *shape: torch.randn(shape, generator=generator))
    adjust = partial(with_mask, problem=problem, mask=mask)
    ways = (GradientOf(mask),)
    return check(kernel, [problem], [("random", 1)], adjust=adjust, ways=ways, mutant=mistake)


@pytest.mark.parametrize("name", ["overlap", "ahead"])
def test_masks_lie_where_keys_do_that_begin_late(tmp_path: Path, name: str) -> None:
    problem = replace(PROBLEM, batch=5, key_bounds=True)
    kernel = emulated(Candidate.of(problem, KNOBS[name]), tmp_path)
    outcome = check(kernel, [problem, replace(problem, causal=False)], [("lazy", 0), ("random", 1)])
    assert outcome.ok, outcome.reason
