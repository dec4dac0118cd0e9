"""Headers of kernels: each has its folder, and no family includes what is of the other."""

from __future__ import annotations

from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.codegen.candidate import Candidate
from attention_autotuner.codegen.kernel_entries import kernel_entry, score_mod
from attention_autotuner.codegen.knobs import KNOBS
from attention_autotuner.codegen.problem import Problem
from attention_autotuner.codegen.render import NAMESPACE, include_closure, include_root, render
from tests.candidates import PLAIN, RETENTION, RETNET, backward, retention

KERNELS = {
    "scores_forward_sm80",
    "scores_forward_sm90",
    "scores_backward_sm80",
    "scores_backward_sm90",
    "chunks_sm80",
    "chunks_sm90",
    "recurrent_sm80",
}


def _sm90(**options: Any) -> Candidate:
    problem = Problem(dtype="fp16", dim_qk=128, dim_v=128, **options)
    return next(one for one in H100().legal(problem) if one.family == "sm90")


CANDIDATES = [
    PLAIN,
    *(backward(plan) for plan in ("fused", "pair", "split")),
    *RETNET,
    *(retention(kind) for kind in RETENTION),
    _sm90(op="retnet", mask="explicit"),
    _sm90(op="retnet", mask="explicit", direction="backward"),
    _sm90(op="retention", causal=True, form="chunkwise"),
]


def test_candidates_are_of_every_kernel_and_of_every_knob_class() -> None:
    assert {kernel_entry(one).kernel for one in CANDIDATES} == KERNELS
    kinds = {(one.op, one.direction, type(one.knobs)) for one in CANDIDATES}
    assert kinds == {(*key, kind) for key, classes in KNOBS.items() for kind in classes}


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda one: one.name[:40])
def test_a_kernel_includes_no_header_of_the_other_family(candidate: Candidate) -> None:
    closure = include_closure(render(candidate).text)
    folders = {path.split("/")[1] for path in closure if path.count("/") > 1}
    assert kernel_entry(candidate).kernel in folders
    other = "sm90" if candidate.family == "sm80" else "sm80"
    assert not {folder for folder in folders if folder.endswith(other)}
    assert candidate.family in folders or kernel_entry(candidate).kernel == "recurrent_sm80"


def test_every_header_of_a_kernel_is_reached_by_some_candidate() -> None:
    reached = {path for one in CANDIDATES for path in include_closure(render(one).text)}
    root = include_root()
    headers = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    peaks = {path for path in headers if path.startswith(f"{NAMESPACE}/peaks/")}
    assert headers - peaks == reached


def test_a_folder_of_a_family_names_no_folder_of_the_other() -> None:
    for family, other in (("sm80", "sm90"), ("sm90", "sm80")):
        for path in (include_root() / NAMESPACE).glob(f"*{family}/*.cuh"):
            assert f"{other}/" not in path.read_text(encoding="utf-8"), path


def test_score_modifications_are_named_by_the_operation_and_its_mask() -> None:
    assert [score_mod(one) for one in (PLAIN, *RETNET)] == [
        "softmax",
        "masked",
        "decayed",
        "masked",
        "decayed",
    ]
    assert score_mod(retention("parallel")) == "decayed"
