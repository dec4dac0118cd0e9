"""`make tune` on a machine without a GPU, with the real compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import probe
from attention_autotuner.cli import main, main_job
from attention_autotuner.cli.main_job import MIN_BUILT, SMALL_ARCHITECTURES
from attention_autotuner.codegen.entries import read_artifact
from attention_autotuner.codegen.store import Store
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.tuning import ranking
from attention_autotuner.tuning.spills import check_spills

pytestmark = [pytest.mark.build, pytest.mark.tune]


def has_gpu() -> bool:
    try:
        probe()
    except UnsupportedArchitectureError:
        return False
    return True


@pytest.mark.skipif(has_gpu(), reason="with a GPU the main job tunes that GPU; tests/gpu covers it")
def test_the_main_job_builds_and_ranks_for_three_architectures(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    new_store: Callable[[Path], Store],
) -> None:
    # As wide as `make tune` begins takes four minutes of two cores, of which the forward kernels are most. Where the
    # first of them spills, as on A100, the search widens.
    monkeypatch.setitem(main_job.WIDTHS, "forward", (1, 4, *main_job.WIDTHS["forward"]))
    with settings.override(cache_dir=new_store(tmp_path / "cache").root):
        status = main(["tune", "--all", "--json"])
        said = json.loads(capsys.readouterr().out)
        assert said["complaints"] == []
        assert status == 0
        by_op = {
            op: [
                result_row
                for result_row in said["results"]
                if result_row["problem"].startswith(f"{op} ")
            ]
            for op in ("attention", "retnet", "retention")
        }
        for op, rows_of_op in by_op.items():
            architectures = (
                ("A100", *SMALL_ARCHITECTURES) if op == "attention" else SMALL_ARCHITECTURES
            )
            assert [(result["arch"], result["direction"]) for result in rows_of_op] == [
                (arch, direction) for arch in architectures for direction in ("forward", "backward")
            ]
        assert sum(map(len, by_op.values())) == len(said["results"])
        assert said["gpu"] is None
        assert "flash_attn_func" in said["left_out"]
        for result in by_op["retnet"] + by_op["retention"]:
            kinds = [row["outcome"]["kind"] for row in result["candidates"] if row["artifact"]]
            assert "ok" in kinds
            assert result["status"] == "predicted"
        for result in by_op["attention"]:
            usable = [
                row
                for row in result["candidates"]
                if row["artifact"] is not None and row["outcome"]["kind"] == "ok"
            ]
            wanted = MIN_BUILT[result["direction"]]
            assert len(usable) >= wanted
            assert result["status"] == "predicted"
            # The model's first, or the default where that promises too little beside it.
            times = {row["name"]: row["estimate_us"] for row in usable}
            first, default = usable[0]["name"], result["default"]
            promised = times[default] > (1 + ranking.DOUBT) * times[first]
            assert result["pick"] == first if promised else result["pick"] in (first, default)
            estimates = [row["estimate_us"] for row in usable]
            assert estimates == sorted(estimates)
            for row in usable[:wanted]:
                artifact = read_artifact(Path(row["artifact"]).parent)
                result_row = candidate_from_config(row["config"])
                assert check_spills(result_row, artifact.report, timed=False).ok
            # A backward kernel keeps every row's statistics there at least: 4 * 16 * 4096 rows of fp32.
            least = 0 if result["direction"] == "forward" else 4 * 4 * 16 * 4096
            assert all(row["workspace_bytes"] >= least for row in usable)
        assert main(["cache", "verify", "--json"]) == 0
        # Narrower searches, whose best spilled, left kernels too.
        assert json.loads(capsys.readouterr().out)["checked"] >= len(said["files"])
