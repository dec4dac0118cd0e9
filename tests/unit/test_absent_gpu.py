"""Without a GPU `warmup`, `why` and `export` decide as a call on the named GPU would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import resolve
from attention_autotuner.cli import inspecting, main, making
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving import dispatch, exports, runtime
from attention_autotuner.serving.exports import choose_picks, environment_of
from attention_autotuner.serving.picks import CacheHierarchy
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.shipped import ShippedRecords

H200 = Environment(
    gpu_name="NVIDIA H200", num_sms=132, compute_capability="9.0", driver="580.95.05"
)
PROBLEMS = {
    "attention": (
        Problem(causal=True, batch=16, seqlen_q=1024, seqlen_k=1024),
        "--batch 16 --seqlen 1024 --dim-qk 128 --causal",
    ),
    "retnet backward": (
        Problem(
            op="retnet", direction="backward", mask="explicit", batch=8, seqlen_q=2048, seqlen_k=2048,
        ),
        "--op retnet --direction backward --mask explicit --batch 8 --seqlen 2048 --dim-qk 128",
    ),
    "attention backward": (
        Problem(direction="backward", deterministic=True, batch=16, seqlen_q=1024, seqlen_k=1024),
        "--direction backward --deterministic --batch 16 --seqlen 1024 --dim-qk 128",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def refuse(kernels: Sequence[Any], target: Any, **options: Any) -> list[Any]:
        return [BuildFailed(reason="not here") for _ in kernels]

    for module in (dispatch, inspecting):
        monkeypatch.setattr(module, "collect", lambda *_, **__: Environment())
    monkeypatch.setattr(exports, "_is_present", lambda policy: False)
    monkeypatch.setattr(making, "build", refuse)
    monkeypatch.setattr(making, "find_toolchain", lambda settings: None)
    with settings.override(cache_dir=tmp_path), runtime.fresh():
        yield


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_h200s_shipped_picks_count_where_there_is_no_gpu(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, flags = PROBLEMS[name]
    policy, hierarchy = resolve("H200"), CacheHierarchy(settings.current())
    there, hit = hierarchy.choose(problem.bucketed(), policy, H200)
    assert hit is not None
    arguments = ["--device-type", "H200", "--json", *flags.split()]
    main(["warmup", *arguments])
    (warm,) = json.loads(capsys.readouterr().out)["kernels"]
    assert (warm["name"], warm["layer"]) == (there.candidate.name, "shipped")
    assert main(["why", *arguments]) == 0
    why = json.loads(capsys.readouterr().out)
    (kept,) = (row for row in why["explanations"] if row["fate"] == "kept")
    assert (kept["name"], why["layer"]) == (there.candidate.name, "shipped")
    (exported, *_) = choose_picks([problem], policy, hierarchy, environment_of(policy, hierarchy))
    assert (exported.candidate, exported.layer) == (there.candidate, "shipped")


def test_the_shipped_picks_are_worth_it() -> None:
    """One of the problems has a pick that is not the default, or the test above would show nothing."""
    policy, hierarchy = resolve("H200"), CacheHierarchy(settings.current())
    picks = [
        hierarchy.choose(problem.bucketed(), policy, H200)[0].candidate
        != policy.default(problem.bucketed())
        for problem, _ in PROBLEMS.values()
    ]
    assert any(picks)


def test_a_gpu_that_nobody_measured_has_its_spec_s_name() -> None:
    hierarchy = CacheHierarchy(settings.current())
    assert hierarchy.environment_of(resolve("A100"), Environment()).gpu_name == "A100"
    assert hierarchy.environment_of(resolve("A100"), H200) is H200
    assert ShippedRecords().count("A100") == 0
