"""Kernels that fault or hang on the GPU: a worker dies of them, and this process's CUDA context does not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_autotuner.arch import probe
from attention_autotuner.arch.resolution import native_arch
from attention_autotuner.codegen.render import include_root
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import isolated
from attention_autotuner.tuning.worker import Limits, Worker

pytestmark = [pytest.mark.gpu, pytest.mark.tune]

PROBLEM = Problem(
    batch=1, heads_q=2, heads_kv=2, seqlen_q=128, seqlen_k=128, dim_qk=64, dim_v=64, causal=True
)
SOURCE = Path(__file__).with_name("faulty_kernel.cu")
SLOW = "-DWORK=200000"  # cycles: no graph holds its launches, so that each counts
# Of a race's launches the 1st is the first there is, the 8th the first that a round samples, after 3 and 4 to prepare,
# and the 16th is in the third round or later, at four launches a round or fewer. No race ends before its tenth round,
# and a round launches at least once whatever the clocks: the 17th is the last that is sure to come.
LAUNCHES = [1, 8, 16]

Faulty = Callable[..., Any]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    """Compile the library with options."""
    folder, toolchain = tmp_path_factory.mktemp("faulty"), find_toolchain()

    def compiled(*options: str) -> Any:
        library = folder / ("".join(options) or "right") / "kernel.so"
        if not library.exists():
            library.parent.mkdir()
            command: list[str | Path] = [
                toolchain.nvcc,
                *toolchain.cuda_flags,
                "-ccbin",
                toolchain.host_cxx,
            ]
            command += [f"-arch=sm_{native_arch(probe().compute_capability)}", "-std=c++17"]
            command += ["-cudart", "static", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden"]
            command += [*options, f"-I{include_root()}", SOURCE, "-o", library]
            subprocess.run(command, check=True)
        return SimpleNamespace(path=library, launch_knobs={})

    return compiled


@pytest.fixture(scope="module")
def started() -> Iterator[Worker]:
    with closing(Worker(0, limits=Limits(launch_seconds=5.0))) as worker:
        yield worker


@pytest.fixture
def worker(started: Worker) -> Iterator[Worker]:
    """A worker; after the test this process's context, and a worker's next one, still multiply."""
    ones = torch.ones(64, 64, device="cuda")
    yield started
    assert torch.equal(ones @ ones, torch.full_like(ones, 64.0))
    torch.cuda.synchronize()
    assert started.call("open", device=0) == torch.version.cuda


@pytest.mark.parametrize("launch", [1, 8])
def test_an_illegal_access_in_a_check_is_a_crash(
    worker: Worker, faulty: Faulty, launch: int
) -> None:
    library = faulty(f"-DILLEGAL_AT={launch}")
    if launch == 1:
        outcome = isolated.verify(worker, PROBLEM, library, deterministic=True)
        assert outcome.kind == "crashed"
        assert "illegal" in outcome.reason.lower()
    timings, _ = isolated.measure(worker, PROBLEM, {"bad": [library]}, budget_seconds=1.0)
    assert [timing.outcome.kind for timing in timings] == ["crashed"]


def test_a_hang_in_a_check_is_cut_short(worker: Worker, faulty: Faulty) -> None:
    outcome = isolated.verify(worker, PROBLEM, faulty("-DHANGS_AT=1"), deterministic=True)
    assert (outcome.kind, outcome.reason) == ("timed_out", "it did not end within 5 s")


@pytest.mark.parametrize(("fault", "kind"), [("ILLEGAL", "crashed"), ("HANGS", "timed_out")])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_race_goes_on_without_the_kernel_that_faults(
    worker: Worker, faulty: Faulty, fault: str, kind: str, launch: int
) -> None:
    kernels = {
        "default": [faulty(SLOW)],
        "bad": [faulty(SLOW, f"-D{fault}_AT={launch}")],
        "good": [faulty(SLOW, "-DHANGS_AT=-1")],
    }
    timings, interrupted = isolated.measure(
        worker, PROBLEM, kernels, budget_seconds=5.0, keep=list(kernels)
    )
    assert not interrupted
    by_name = {timing.name: timing for timing in timings}
    assert by_name["bad"].outcome.kind == kind
    for name in ("default", "good"):
        assert by_name[name].outcome.ok
        assert by_name[name].samples >= 4


def test_rounds_in_which_each_is_waited_for_agree_with_those_in_which_all_are(
    worker: Worker, faulty: Faulty
) -> None:
    worker.call(
        "prepare",
        problem=asdict(PROBLEM),
        entries={"one": [isolated.crossing(faulty(SLOW))]},
        seed=0,
    )
    rounds = [  # in turns, as the clock of a GPU that rested still changes
        [worker.call("round", order=["one"], alone=alone)["one"] for alone in (False, True)]
        for _ in range(9)
    ]
    together, alone = (sorted(times)[4] for times in zip(*rounds, strict=True))
    assert alone == pytest.approx(together, rel=0.03)
