"""The rule on spills, which search, sweep and predicted picks apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.codegen.render import RenderedKernel
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.core.report import CompilerReport
from attention_autotuner.tuning import tune
from attention_autotuner.tuning.pipeline import Built
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.spills import SPILL_WORTH_TIMING, check_spills, spilled_bytes
from attention_autotuner.tuning.stages import Engine
from tests.fake_pipeline import FakeBuilt, FakePipeline

POLICY = H100()
FORWARD = Problem(batch=2, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024)
BACKWARD = replace(FORWARD, direction="backward")
RECURRENT = replace(FORWARD, op="retention", causal=True, form="recurrent")


def report(spilled: int, loop_spills: bool | None) -> CompilerReport:
    half = spilled // 2
    return replace(
        parse_ptxas(""),
        registers=128,
        spill_store_bytes=half,
        spill_load_bytes=spilled - half,
        loop_spills=loop_spills,
    )


LITTLE, MUCH = SPILL_WORTH_TIMING, SPILL_WORTH_TIMING + 2


@pytest.mark.parametrize(
    ("problem", "spilled", "loop_spills", "timed", "fine"),
    [
        # Outside loops any number of bytes is fine.
        (FORWARD, MUCH, False, True, True),
        (FORWARD, MUCH, False, False, True),
        # A measurement decides about a few bytes; without one, a forward kernel may spill none.
        (FORWARD, LITTLE, True, True, True),
        (FORWARD, MUCH, True, True, False),
        (FORWARD, 2, True, False, False),
        (BACKWARD, LITTLE, True, False, True),
        (BACKWARD, MUCH, True, False, False),
        # Loops without a disassembly.
        (FORWARD, MUCH, None, True, True),
        (FORWARD, 2, None, False, False),
        (FORWARD, 0, None, False, True),
        (BACKWARD, MUCH, None, False, False),
        # The recurrent form is one loop, which the disassembly does not show.
        (RECURRENT, LITTLE, False, True, True),
        (RECURRENT, MUCH, False, True, False),
        (RECURRENT, MUCH, None, True, False),
        (RECURRENT, 2, False, False, False),
    ],
)
def test_limits_of_spills_in_a_mainloop(
    problem: Problem, spilled: int, loop_spills: bool | None, timed: bool, fine: bool
) -> None:
    outcome = check_spills(POLICY.default(problem), report(spilled, loop_spills), timed=timed)
    assert outcome.kind == ("ok" if fine else "spilled")
    assert fine or f"{spilled} bytes a thread" in outcome.reason


@pytest.mark.parametrize("problem", [FORWARD, BACKWARD, RECURRENT])
@pytest.mark.parametrize("spilled", [0, 2, LITTLE, MUCH])
@pytest.mark.parametrize("loop_spills", [None, False, True])
def test_a_sweep_and_a_search_leave_out_the_same_candidates(
    tmp_path: Path, problem: Problem, spilled: int, loop_spills: bool | None
) -> None:
    said = report(spilled, loop_spills)
    default = POLICY.default(problem)
    others: list[Candidate] = []

    class Pipeline(FakePipeline):
        def build(
            self,
            kernels: Sequence[RenderedKernel],
            progress: Callable[[int, int, str, float], None],
            stop: Callable[[], bool] = lambda: False,
        ) -> Sequence[Built | Outcome]:
            # The default spills nothing, so that no spilling candidate is kept for lack of another.
            built: list[Built | Outcome] = []
            for kernel in kernels:
                spills_nothing = kernel.candidate == default
                others.extend([] if spills_nothing else [kernel.candidate])
                said_of_it = report(0, False) if spills_nothing else said
                built.append(FakeBuilt(path=Path(kernel.name), report=said_of_it))
            return built

    engine = Engine(policy=POLICY, pipeline=Pipeline(), records=RecordStore(tmp_path))
    result = tune(problem, POLICY, records=engine.records, pipeline=engine.pipeline, top_k=3)
    outcomes = {row.candidate: row.outcome for row in result.rows}
    for candidate in others:
        built = FakeBuilt(path=tmp_path, report=said)
        swept = engine.prepared(candidate, built, "", default=False).outcome
        assert outcomes[candidate] == swept == check_spills(candidate, said, timed=True)
    assert others


def test_spilled_bytes_are_stores_and_loads() -> None:
    assert spilled_bytes(replace(parse_ptxas(""), spill_store_bytes=12, spill_load_bytes=30)) == 42
