"""Retnet's dK from scores that dQ's pass has stored, on an emulated machine: results, bands, and mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Wrong
from attention_autotuner.core.problem import DType
from attention_autotuner.kernels.scores_backward_sm90.knobs import StoredPass
from attention_autotuner.operations.retnet.inputs import RetNetBackward
from attention_autotuner.serving.loader import LoadedKernel
from tests.candidates import MASKED_BACKWARD, SM90_PASS, masked_backward
from tests.emulation.build import build
from tests.emulation.check import RUNS, check

pytestmark = pytest.mark.build

BANDS = "scores_backward_sm90/score_bands.cuh"
STORED = "scores_backward_sm90/stored_scores.cuh"
SCORES = "scores_backward_sm90/mainloop.cuh"
MUTANTS = {
    "one_head_a_band": (BANDS, "batches = even_share(p.batch, wanted);", "batches = 1;"),
    "stage_not_awaited": (STORED, "ring(smem).consumer_wait(at);", ""),
    "stage_released_early": (STORED, "warpgroup_wait<1>();", ""),
    "unseen_keys_kept": (SCORES, "store_p<true>(loop, column);", ""),
    "signs_not_read": (STORED, "loop_row = band.loop_rows;", ""),
}
CAUGHT = [
    ("stage_not_awaited", "lazy", "races with the write of a copy"),
    ("stage_released_early", "lazy", "has yet to read"),
    ("unseen_keys_kept", "eager", "dk: "),
]
ROWS = replace(MASKED_BACKWARD, dim_qk=64, dim_v=64)
SQUARE = replace(ROWS, batch=2, heads_q=1, seqlen_q=330, seqlen_k=330, causal=True)
BANDED = replace(ROWS, batch=3, heads_q=4, heads_kv=2, seqlen_q=130, seqlen_k=70)


def candidate(
    dtype: DType = "fp16",
    rows: int = 128,
    stages: int = 2,
    columns: int = 64,
    dims: tuple[int, int] = (64, 64),
) -> Candidate:
    plain = replace(SM90_PASS, block_columns=columns)
    return masked_backward(
        {
            "dq": plain,
            "dk": None,
            "stored_dk": StoredPass(warpgroup_rows=rows, num_stages=stages),
            "dv": plain,
            "gathered_stores": dtype == "fp16",
        },
        dtype=dtype,
        padded_dim_qk=dims[0],
        padded_dim_v=dims[1],
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> LoadedKernel:
    return build(candidate(), tmp_path_factory.mktemp("stored"), MUTANTS)


def test_stored_scores_are_right(emulated: LoadedKernel) -> None:
    outcome = check(emulated, [ROWS, SQUARE])
    assert outcome.ok, outcome.reason


def test_bands_of_one_head_are_right(emulated: LoadedKernel) -> None:
    outcome = check(emulated, [BANDED], RUNS[::2], mutant="one_head_a_band")
    assert outcome.ok, outcome.reason


def test_other_tiles_are_right(tmp_path: Path) -> None:
    """Head dims between blocks of 64 columns, too, where CTAs share the heads of a group."""
    kernel = build(candidate("bf16", rows=64, stages=3, columns=128, dims=(80, 128)), tmp_path)
    problem = replace(ROWS, dtype="bf16", dim_qk=72, dim_v=128)
    outcome = check(kernel, [problem, replace(problem, causal=True)], RUNS[::2])
    assert outcome.ok, outcome.reason


def test_signs_are_read_where_r_has_a_gradient(emulated: LoadedKernel) -> None:
    way = RetNetBackward(any_values=True, r_grad=True, note=", through r")
    assert check(emulated, [BANDED, SQUARE], [("random", 1)], ways=(way,)).ok
    outcome = check(emulated, [BANDED], [("eager", 1)], ways=(way,), mutant="signs_not_read")
    assert isinstance(outcome, Wrong)
    assert outcome.reason.startswith("dk: ")


@pytest.mark.parametrize(("mutant", "policy", "message"), CAUGHT)
def test_mistakes_are_caught(
    emulated: LoadedKernel, mutant: str, policy: str, message: str
) -> None:
    outcome = check(emulated, [SQUARE], [(policy, 1)], mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))
    assert message in outcome.reason, outcome.reason


def test_kept_columns_are_right(tmp_path: Path) -> None:
    # As by default at 128 columns: signs are found before the mask is read.
    deep = replace(SM90_PASS, block_columns=128, num_stages=2, slice_stages=2, kept_depth=64)
    passes = {"dq": deep, "dk": deep, "dv": deep, "gathered_stores": True}
    lost = {"signs_lost": (SCORES, "s[i] = with_sign(s[i], 1.0f);", "")}
    kernel = build(masked_backward(passes), tmp_path, lost)
    way = RetNetBackward(any_values=True, r_grad=True, note=", through r")
    causal = replace(MASKED_BACKWARD, seqlen_k=300, causal=True)
    outcome = check(kernel, [MASKED_BACKWARD, causal], RUNS[::2], ways=(way,))
    assert outcome.ok, outcome.reason
    outcome = check(kernel, [MASKED_BACKWARD], RUNS[:1], ways=(way,), mutant="signs_lost")
    assert isinstance(outcome, Wrong)
    assert outcome.reason.startswith("dq: ")
