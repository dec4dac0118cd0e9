"""Headers of kernels: each kernel has its folder, and no family includes headers of the other."""

from __future__ import annotations

from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.codegen.render import include_closure, include_root, render
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.cpp import NAMESPACE
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.registry import KERNELS
from tests.candidates import (
    PLAIN,
    RETENTION,
    RETNET,
    backward,
    candidates_of_every_service,
    retention,
)


def _sm90(**options: Any) -> Candidate:
    problem = Problem(dtype="fp16", dim_qk=128, dim_v=128, **options)
    return next(candidate for candidate in H100().legal(problem) if candidate.family == "sm90")


CANDIDATES = [
    PLAIN,
    *(backward(plan) for plan in ("one_pass", "two_kernels", "three_kernels")),
    *RETNET,
    *(retention(kind) for kind in RETENTION),
    _sm90(op="retnet", mask="explicit"),
    _sm90(op="retnet", mask="explicit", direction="backward"),
    _sm90(op="retention", causal=True, form="chunkwise"),
    *candidates_of_every_service(),
]


def test_candidates_cover_every_kernel_and_all_its_services() -> None:
    assert {candidate.kernel for candidate in CANDIDATES} == set(KERNELS)
    served = {
        (candidate.kernel, candidate.op, candidate.direction, candidate.score)
        for candidate in CANDIDATES
    }
    every = {(name, *service) for name, kernel in KERNELS.items() for service in kernel.serves}
    assert {kind[:3] for kind in served} == {kind[:3] for kind in every}
    assert served <= every


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name[:40])
def test_a_kernel_includes_no_header_of_the_other_family(candidate: Candidate) -> None:
    closure = include_closure(render(candidate).text)
    folders = {path.split("/")[1] for path in closure if path.count("/") > 1}
    assert candidate.kernel in folders
    other = "sm90" if candidate.family == "sm80" else "sm80"
    assert not {folder for folder in folders if folder.endswith(other)}
    assert candidate.family in folders or candidate.kernel == "recurrent_sm80"


def test_every_header_of_a_kernel_is_reached_by_some_candidate() -> None:
    reached = {path for candidate in CANDIDATES for path in include_closure(render(candidate).text)}
    root = include_root()
    headers = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    peaks = {path for path in headers if path.startswith(f"{NAMESPACE}/peaks/")}
    assert headers - peaks == reached


def test_no_header_of_a_family_names_a_folder_of_the_other() -> None:
    for family, other in (("sm80", "sm90"), ("sm90", "sm80")):
        for path in (include_root() / NAMESPACE).glob(f"*{family}/*.cuh"):
            assert f"{other}/" not in path.read_text(encoding="utf-8"), path


def test_score_modifications_follow_from_the_operation_and_its_mask() -> None:
    assert [candidate.score for candidate in (PLAIN, *RETNET)] == [
        "softmax",
        "masked",
        "decayed",
        "masked",
        "decayed",
    ]
    assert retention("parallel").score == "decayed"
