"""A second, fresh process that times built kernels: what confirms a pick, and where isolated measuring starts from.

Run as ``python -m attention_autotuner.tuning.worker REQUEST RESPONSE``: two JSON files, the first written by the
caller, the second by the worker. Only names, library paths and the problem cross over.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.outcome import outcome_from_json
from ..core.problem import Problem
from ..errors import ArtifactError
from .racing import Timing

Library = tuple[Path, Mapping[str, int]]
"""A library, or the folder that holds it, and the launch knobs of its candidate."""
START_SECONDS = 120.0  # for Python, torch and CUDA to come up, beside the budget
RACE_SECONDS = 20.0  # of one race for its inputs and first launches, beside the budget
LOG_CHARACTERS = 2000


def time_all_in_worker(
    races: Sequence[tuple[Problem, Mapping[str, Library]]], *, budget_seconds: float, device: int
) -> list[list[Timing]]:
    """Run several races in one fresh process.

    Args:
        races: what the kernels of each compute, and candidate name -> what is launched; in tie-breaking order.
        budget_seconds: of the rounds of each; starting up comes on top.
        device: CUDA device index to measure on.

    Returns:
        For each race one timing per kernel, fastest first. All are timed in every round.

    Raises:
        ArtifactError: the process died, ran past its time or left no answer; the message ends with its last words. None
            of the races counts.
    """
    request = {
        "races": [
            {
                "problem": asdict(problem),
                "entries": [
                    {"name": name, "path": str(path), "launch_knobs": dict(knobs)}
                    for name, (path, knobs) in kernels.items()
                ],
            }
            for problem, kernels in races
        ],
        "budget_seconds": budget_seconds,
        "device": device,
    }
    with tempfile.TemporaryDirectory(prefix="attention_autotuner_") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "response.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(asked), str(answered)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=START_SECONDS + len(races) * (RACE_SECONDS + 3 * budget_seconds),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ArtifactError(f"the measuring process ran past {error.timeout:.0f} s") from error
        if done.returncode != 0 or not answered.is_file():
            raise ArtifactError(
                f"the measuring process ended with status {done.returncode}: "
                f"{done.stderr[-LOG_CHARACTERS:]}"
            )
        answers = json.loads(answered.read_text(encoding="utf-8"))
        return [[_timing(item) for item in answer] for answer in answers]


def _timing(data: Mapping[str, Any]) -> Timing:
    return Timing(**{**data, "outcome": outcome_from_json(data["outcome"])})


def main(arguments: list[str]) -> int:
    """Answer one request; see the module's text."""
    from .measure import InProcessMeasurer, KernelEntry, use_device

    asked, answered = (Path(argument) for argument in arguments)
    request = json.loads(asked.read_text(encoding="utf-8"))
    use_device(request["device"])
    answers = []
    for race in request["races"]:
        problem = Problem(**race["problem"])
        entries = [
            KernelEntry(**{**entry, "path": Path(entry["path"])}, problem=problem)
            for entry in race["entries"]
        ]
        timings = InProcessMeasurer(seed=1).measure(
            problem,
            entries,
            budget_seconds=request["budget_seconds"],
            keep=[entry.name for entry in entries],
        )
        answers.append(
            [{**asdict(timing), "outcome": timing.outcome.to_json()} for timing in timings]
        )
    answered.write_text(json.dumps(answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
