"""Few queries in attention's forward of both families, on the emulated machine: packed heads and split keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import LaunchFailed, Nondeterministic, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.operations.params import workspace_bytes
from attention_autotuner.serving.loader import LoadedKernel
from tests.build.test_packed_sequences_builds import nothing_behind
from tests.emulation.build import build
from tests.emulation.check import RUNS, check

pytestmark = pytest.mark.build

COMBINE = "common/split_combine.cuh"
OUTPUT = "attention_forward_sm90/output.cuh"
PRODUCER = "attention_forward_sm90/producer.cuh"
MUTANTS = {
    "results_added": (
        COMBINE,
        "of[block][0] = fmaf(share, values[i][block].x, of[block][0]);",
        "of[block][0] += values[i][block].x;",
    ),
    "warps_not_waited_for": (COMBINE, "__syncthreads();", ""),
    "one_warp_alone": (COMBINE, "of[block][0] += values.x;", ""),
    "begins_before_what_is_ahead": (
        "attention_forward_sm90/kernel.cuh",
        "if constexpr (!T::kPacked) wait_on_dependent_grids();",
        "",
    ),
    "rows_missed": (OUTPUT, "if (!row.exists) return;", "if (row.head != 0) return;"),
    "lse_misplaced": (
        OUTPUT,
        "if (lane == 0) arguments.partial_lse[place] = log2_sum(maximum, total);",
        "if (lane == 0) arguments.partial_lse[place] = maximum;",
    ),
    "bytes_miscounted": (
        PRODUCER,
        "arrive_and_expect_tx(arrived, arguments.packed.rows * T::kDepthLoaded * 2);",
        "arrive_and_expect_tx(arrived, T::kBlockM * T::kDepthLoaded * 2 + 128);",
    ),
}
# batch, heads_q, heads_kv, seqlen_q, seqlen_k, causal
SIZES = [
    (2, 8, 1, 1, 513, ""),  # 8 heads of a group, the last tile of keys nearly empty
    (1, 10, 2, 5, 333, "bottom_right"),  # 60 rows of 64
    (1, 8, 2, 4, 400, "top_left"),  # most splits are left without a key that anybody sees
    (1, 4, 2, 77, 130, "bottom_right"),  # several tiles of rows
    (1, 142, 2, 1, 100, ""),  # 71 heads of a group, which no tile of 64 rows holds
    (1, 2, 2, 3, 1, ""),
]


def sized(
    batch: int,
    heads_q: int,
    heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: str,
    packed_rows: tuple[int, int] = (0, 0),
) -> Problem:
    return Problem(
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        packed_rows=packed_rows,
        causal=bool(causal),
        causal_alignment="top_left" if causal == "top_left" else "bottom_right",
        dim_qk=64,
        dim_v=64,
    )


PROBLEMS = [sized(*sizes) for sizes in SIZES]


def candidate(**knobs: Any) -> Candidate:
    values = {
        "warpgroups": 1,
        "block_n": 64,
        "mainloop": "overlap",
        "q_stages": 1,
        "output": "direct",
        "schedule": "static",
        "pack_gqa": True,
        "split_kv": True,
        **knobs,
    }
    return Candidate(
        dtype="fp16",
        padded_dim_qk=64,
        padded_dim_v=64,
        knobs=AttentionForwardSm90Knobs(**values),
    )


def runs_of(splits: int) -> Sequence[tuple[str, int]]:
    """All policies for three splits; other numbers run the same code, under the policy that mixes most."""
    return RUNS if splits == 3 else [("random", 1)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> LoadedKernel:
    folder = tmp_path_factory.mktemp("emulation") / "mutants"
    return build(candidate(), folder, MUTANTS)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 9])
def test_split_keys_give_the_same(emulated: LoadedKernel, splits: int) -> None:
    outcome = check(emulated.with_launch_knobs({"splits": splits}), PROBLEMS, runs_of(splits))
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    "knobs",
    [
        {"warpgroups": 2, "mainloop": "serial", "pack_gqa": False},
        {"warpgroups": 2, "mainloop": "strict", "schedule": "dynamic", "q_stages": 2},
        {"mainloop": "overlap_flat", "schedule": "grid", "q_stages": 2},
    ],
    ids=lambda knobs: knobs["mainloop"],
)
def test_other_main_loops_and_schedules(tmp_path: Path, knobs: dict[str, Any]) -> None:
    kernel = build(candidate(**knobs), tmp_path / "kernel").with_launch_knobs({"splits": 3})
    outcome = check(kernel, PROBLEMS[:4], [("lazy", 0), ("random", 1)])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize(("warpgroups", "schedule"), [(3, "static"), (4, "static"), (4, "dynamic")])
def test_warpgroups_that_take_turns_split_keys(
    tmp_path: Path, warpgroups: int, schedule: str
) -> None:
    loop = {"mainloop": "scores_first", "ping_pong": True, "k_stages": 3}
    tall = candidate(warpgroups=warpgroups, schedule=schedule, **loop)
    chunk = replace(PROBLEMS[3], heads_q=8, seqlen_k=400)  # four tiles of rows for each head of K
    kernel = build(tall, tmp_path / "kernel").with_launch_knobs({"splits": 3})
    outcome = check(kernel, [chunk, *PROBLEMS[2:4]], RUNS)
    assert outcome.ok, outcome.reason


def test_packed_rows_need_no_splits(tmp_path: Path) -> None:
    kernel = build(candidate(split_kv=False), tmp_path / "kernel")
    outcome = check(kernel, PROBLEMS[:4], [("lazy", 0)])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_caught(emulated: LoadedKernel, mutant: str) -> None:
    combines = MUTANTS[mutant][0] == COMBINE
    whole = replace(PROBLEMS[0], batch=1, seqlen_k=620 if combines else 300)
    kernel = emulated.with_launch_knobs({"splits": 9 if combines else 3})
    outcome = check(kernel, [whole], [("lazy", 0), ("random", 1)][: 1 + combines], mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Nondeterministic, Wrong))


# --- family sm80 --------------------------------------------------------------------------------------

EPILOGUE = "scores_forward_sm80/epilogue.cuh"
WARP = "scores_forward_sm80/warp.cuh"
MUTANTS_SM80 = {
    "rows_missed": (EPILOGUE, "if (!w.row_exists(tile, row)) return;", "if (row != 0) return;"),
    "lse_misplaced": (
        EPILOGUE,
        "w.list.partial_lse[place] = w.score_mod.row_log2(w, i, half);",
        "w.list.partial_lse[place] = w.score_mod.maximum[i][half];",
    ),
    "rest_not_shared": (WARP, "tiles = share + (split < rest);", "tiles = share;"),
    "keys_not_skipped": (
        WARP,
        "range.skip((split * share + minimum(split, rest)) * T::kBlockN);",
        "",
    ),
}


def rows(problem: Problem, **knobs: Any) -> Candidate:
    values: dict[str, Any] = {"block_m": 16, "block_n": 64, "warps_m": 1, "warps_n": 4}
    values |= {"num_stages": 2, "k_slice": problem.padded_dim_qk, "pack_gqa": True}
    return Candidate.of(problem, ForwardKnobs(**{**values, "split_kv": True, **knobs}))


@pytest.fixture(scope="module")
def emulated_sm80(tmp_path_factory: pytest.TempPathFactory) -> LoadedKernel:
    folder = tmp_path_factory.mktemp("emulation") / "mutants"
    return build(rows(PROBLEMS[0]), folder, MUTANTS_SM80)


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_split_keys_of_sm80_give_the_same(emulated_sm80: LoadedKernel, splits: int) -> None:
    outcome = check(emulated_sm80.with_launch_knobs({"splits": splits}), PROBLEMS, runs_of(splits))
    assert outcome.ok, outcome.reason


GROUPED = {"batch": 1, "heads_q": 8, "heads_kv": 2, "causal": True, "seqlen_q": 4, "seqlen_k": 333}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bounds": ({"key_bounds": True}, {"block_m": 32, "warps_m": 2, "warps_n": 2}),
    "ahead": (
        {"seqlen_q": 128, "heads_q": 4},
        {"block_m": 64, "warps_m": 4, "warps_n": 1, "qk_ahead": True, "pack_gqa": False},
    ),
    "slices": (
        {"dim_qk": 128, "dim_v": 256},
        {"block_m": 64, "warps_m": 2, "warps_n": 2, "k_slice": 32, "v_slices": 2},
    ),
    "stages": (
        {"dim_qk": 72, "dim_v": 72, "alignment_bytes": 2},
        {"block_m": 32, "warps_m": 2, "warps_n": 1, "num_stages": 3, "block_n": 32},
    ),
    "modified": (
        {"window_size": (100, 0), "modifications": ("alibi_slopes", "sinks", "softcap")},
        {"persistent": True, "cta_order": "longest_first"},
    ),
    "registers": (
        {"seqlen_q": 1, "causal": False, "dim_qk": 128, "dim_v": 128},
        {"q_in_registers": True, "num_stages": 1, "warps_n": 2},
    ),
    "alone": ({"heads_q": 6, "seqlen_q": 31}, {"split_kv": False, "warps_n": 2}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_sm80(tmp_path: Path, name: str) -> None:
    sizes, knobs = VARIANTS[name]
    problem = Problem(dtype="bf16", **{"dim_qk": 64, "dim_v": 64, **GROUPED, **sizes})
    kernel = build(rows(problem, **knobs), tmp_path / "kernel")
    if knobs.get("split_kv", True):
        kernel = kernel.with_launch_knobs({"splits": 3})
    short = replace(problem, batch=2, seqlen_k=100)
    outcome = check(kernel, [problem, short], [("lazy", 0), ("random", 1)])
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("mutant", MUTANTS_SM80)
def test_mistakes_of_sm80_are_caught(emulated_sm80: LoadedKernel, mutant: str) -> None:
    kernel = emulated_sm80.with_launch_knobs({"splits": 3})
    problem = replace(
        PROBLEMS[1], seqlen_k=300
    )  # five tiles of keys, which three splits do not share evenly
    outcome = check(kernel, [problem], [("lazy", 0)], mutant=mutant)
    assert isinstance(outcome, (LaunchFailed, Wrong))


# --- packed sequences ---------------------------------------------------------------------------------

# sequences, heads_q, heads_kv, the most queries and keys of one, causal, rows of all
PACKED = [
    sized(7, 8, 2, 1, 513, "bottom_right", (7, 1900)),
    sized(5, 10, 2, 5, 333, "", (14, 700)),  # 60 rows of 64
    sized(4, 4, 2, 77, 130, "top_left", (95, 260)),  # a prompt among single tokens
]
LIST = "sm90/sequence_list.cuh"
MUTANTS_PACKED = {
    "sm90": {
        "blocks_of_one_head": (
            "attention_forward_sm90/entry.cuh",
            "list.rows = Divider::by(queries);",
            "list.rows = Divider::by(T::kBlockM);",
        ),
        "places_of_blocks": (
            LIST,
            "place += keys[i].key > key ? keys[i].splits : 0;",
            "place += keys[i].key > key;",
        ),
        "as_many_parts_in_all_rows": (
            COMBINE,
            "of_row.splits = row < r.rows ? r.row_splits[row] : 0;",
            "of_row.splits = row < r.rows ? r.splits : 0;",
        ),
        "written_rows_combined": (
            COMBINE,
            "return row < r.rows && r.row_splits[row] > 1;",
            "return row < r.rows;",
        ),
    },
    "sm80": {
        "rows_of_the_first_sequence": (
            "scores_forward_sm80/rows.cuh",
            "return head * params.total_q + of_sequence.first_query + query_of(tile, row);",
            "return head * params.total_q + query_of(tile, row);",
        ),
    },
}


def made_packed(family: str) -> Candidate:
    if family == "sm80":
        return rows(PACKED[0])
    return Candidate.of(PACKED[0], candidate(schedule="dynamic").knobs)


@pytest.fixture(scope="module", params=["sm90", "sm80"])
def emulated_packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedKernel, str]:
    family = request.param
    folder = tmp_path_factory.mktemp("emulation") / "packed"
    return build(made_packed(family), folder, MUTANTS_PACKED[family]), family


@pytest.mark.parametrize("splits", [1, 3])
def test_packed_sequences_split_keys(
    emulated_packed: tuple[LoadedKernel, str], splits: int
) -> None:
    kernel, family = emulated_packed[0].with_launch_knobs({"splits": splits}), emulated_packed[1]
    checked = partial(check, kernel, adjust=nothing_behind, multiprocessors=24)
    outcome = checked([*PACKED, PACKED[0]], runs_of(splits)[-2:])
    assert outcome.ok, outcome.reason
    made = made_packed(family).launched({"splits": splits})
    for problem in (*PACKED, replace(PACKED[0], batch=300, packed_rows=(999, 77777))):
        expected = kernel_of(made).workspace_bytes(problem, made)
        assert workspace_bytes(problem, kernel.path, {"splits": splits}) == expected
    if splits > 1:
        for mutant in MUTANTS_PACKED[family]:
            assert not checked(PACKED, [("lazy", 0)], mutant=mutant).ok, mutant
