"""The bars of searches, measured by hand on a machine with a GPU and 16 cores.

``python -m tests.gpu.bars_search --output FILE`` measures all; ``--only kills crowd`` some, which take the place of
those that the file has. Minutes, with 16 cores: prove 3, budget 1, cold 2, kills 6, crowd 2, repeat 10 (``--repeats
10 --extend`` twice splits it), sweep 3, whole-sweep 10, first 3. Prints a line a bar. Status 1: one was missed; 2:
there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from attention_autotuner.arch import detect
from attention_autotuner.cli.options import positive
from attention_autotuner.codegen.files import write_json
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.tuning.environment import collect
from benchmarks import first_call

FORWARD: dict[str, Any] = {
    "batch": 4,
    "heads_q": 16,
    "heads_kv": 16,
    "seqlen_q": 4096,
    "seqlen_k": 4096,
}
BACKWARD: dict[str, Any] = {**FORWARD, "direction": "backward"}
SMALL: list[dict[str, Any]] = [
    {
        "batch": n,
        "heads_q": 4,
        "heads_kv": 4,
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "dim_qk": 64,
        "dim_v": 64,
    }
    for n in range(1, 32)
]
REPEATED = [
    {**FORWARD, "dim_qk": dim, "dim_v": dim, "causal": causal}
    for dim in (64, 128)
    for causal in (False, True)
]
KILLS, CROWD, REPEATS = 30, 16, 20
GONE_SECONDS = 10.0  # for a killed search's processes to be gone
BUDGET_SECONDS, BUDGET_BAR = 20.0, 25.0
COLD_BARS = {"forward": 27.0, "backward": 37.0}
CROWD_BAR = 1.5  # of the time of one
SWEEP_BARS = {150: 12, 540: 24}  # seconds -> picks, of as many as the last
FIRST_BAR = 0.030
TIMED = ("measured", "recorded")

PROGRAM = """
import json, sys
from attention_autotuner import tune
from attention_autotuner.core.problem import Problem

asked, said = json.loads(sys.argv[1]), []
for fields in asked["problems"]:
    compiled = []

    def listen(event):
        name, _, took = event.message.rpartition(" in ")
        if event.phase == "build" and name and took != "0 s":  # what others compiled takes none
            compiled.append(name)

    result = tune(Problem(**fields), listener=listen, **asked["options"])
    said.append({
        "status": result.status,
        "pick": result.pick.name,
        "ties": [row.candidate.name for row in result.rows if row.tied],
        "seconds": result.seconds,
        "record": result.record_path and str(result.record_path),
        "compiled": compiled,
    })
print(json.dumps(said))
"""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar that was measured.

    Attributes:
        name: of the bar.
        passed: it was met.
        said: one line about it.
        data: the figures.
        seconds: that it took to measure.
    """

    name: str
    passed: bool
    said: str
    data: Mapping[str, Any]
    seconds: float = 0.0


class Search:
    """Searches for problems in one process of their own; ``options`` are those of ``tune``."""

    def __init__(self, cache: Path, problems: Sequence[Mapping[str, Any]], **options: Any) -> None:
        asked = json.dumps({"problems": problems, "options": options})
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, asked],
            env=_variables(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self) -> list[dict[str, Any]]:
        """The fate of each problem; ``wall`` is the whole process's time."""
        printed, errors = self.process.communicate()
        if self.process.returncode != 0:
            raise RuntimeError(f"a search ended with {self.process.returncode}: {errors[-2000:]}")
        wall = time.monotonic() - self._began
        return [{**item, "wall": wall} for item in json.loads(printed.splitlines()[-1])]

    def kill(self, seconds: float) -> bool:
        """Kill it after so many seconds, as nothing can be caught; False where it had ended."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        return self.process.returncode == -signal.SIGKILL


def _variables(cache: Path) -> dict[str, str]:
    return {**os.environ, "ATTENTION_AUTOTUNER_CACHE_DIR": str(cache)}


def command(cache: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of a command."""
    asked = [sys.executable, "-m", "attention_autotuner", *arguments, "--json"]
    done = subprocess.run(asked, env=_variables(cache), capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return done.returncode or 1, {"error": done.stderr[-2000:]}
    return done.returncode, answer


# --- what journals and picks say ------------------------------------------------------------------


def audit(journal: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The work that was done twice, by the journal of a search that was killed many times, and lines that are torn.

    Args:
        journal: its text.
        entries: of the record that came of it: the samples of each must be its rounds, all of them.
    """
    checks: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    ratios: Counter[tuple[str, str]] = Counter()
    torn = 0
    for line in filter(None, journal.splitlines()):
        try:
            said = json.loads(line)
        except ValueError:
            torn += 1
            continue
        if "outcome" in said:
            checks[said["kernel"]] += 1
        elif "round" in said:
            rounds.update(kernel.partition("@")[0] for kernel in said["round"])
        elif "ratio" in said:
            ratios[said["pick"], said["default"]] += 1
    samples = {e["name"]: e["measurement"]["samples"] for e in entries if e["measurement"]}
    return {
        "twice": [name for name, count in (*checks.items(), *ratios.items()) if count > 1],
        "lost": {n: [rounds[n], count] for n, count in samples.items() if rounds[n] != count},
        "torn": torn,
        "rounds": max(rounds.values(), default=0),
    }


def disagreements(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The picks for a problem that are neither the usual one nor said to be tied with it."""
    usual, _ = Counter(run["pick"] for run in runs).most_common(1)[0]
    return [run["pick"] for run in runs if run["pick"] != usual and usual not in run["ties"]]


def left_behind(cache: Path) -> list[int]:
    """Processes that still have a cache as theirs after a while."""
    mark, end = f"ATTENTION_AUTOTUNER_CACHE_DIR={cache}\0".encode(), time.monotonic() + GONE_SECONDS
    while True:
        alive = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it is gone, or somebody else's
                if mark in place.read_bytes() + b"\0":
                    alive.append(int(place.parent.name))
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.2)


# --- the bars -------------------------------------------------------------------------------------


def prove(folder: Path, options: argparse.Namespace) -> Bar:
    """Verify each shipped kernel."""
    bad, states = [], Counter[str]()
    for shipped in Path(str(files("attention_autotuner.tuned"))).glob("*.jsonl"):
        copy = shutil.copy(shipped, folder)
        status, said = command(folder / "cache", "records", "prove", "--again", "--file", str(copy))
        bad += [shipped.name] if status else []
        states.update(said.get("states", {}))
    return Bar(name="prove", passed=not bad, said=f"{dict(states)}", data={"states": dict(states)})


def budget(folder: Path, options: argparse.Namespace) -> Bar:
    """A search of all candidates in 20 s."""
    asked = {"budget_seconds": BUDGET_SECONDS, "effort": "full"}
    (said,) = Search(folder, [FORWARD], **asked).result()
    passed = said["seconds"] <= BUDGET_BAR and said["status"] == "measured"
    text = f"{said['seconds']:.1f} s ({said['wall']:.1f} of its process), {said['status']}"
    return Bar(name="budget", passed=passed, said=f"{text}; at most {BUDGET_BAR:g}", data=said)


def cold(folder: Path, options: argparse.Namespace) -> Bar:
    """Searches with nothing at hand."""
    problems = {"forward": FORWARD, "backward": BACKWARD}
    said = {name: Search(folder / name, [problems[name]]).result()[0] for name in problems}
    passed = all(
        said[name]["seconds"] <= bar and said[name]["status"] == "measured"
        for name, bar in COLD_BARS.items()
    )
    text = ", ".join(f"{n} {said[n]['seconds']:.1f} s of {bar:g}" for n, bar in COLD_BARS.items())
    return Bar(name="cold", passed=passed, said=text, data=said)


def kills(folder: Path, options: argparse.Namespace) -> Bar:
    """``kill -9`` at random moments of searches whose kernels are built."""
    Search(folder, [SMALL[0]]).result()  # builds
    (whole,) = Search(folder, [SMALL[1]]).result()
    chance, count, audits = random.Random(options.seed), 0, []
    for problem in SMALL[2:]:
        if count == KILLS:
            break
        while count < KILLS and Search(folder, [problem]).kill(chance.uniform(0.5, whole["wall"])):
            count += 1
        (said,) = Search(folder, [problem]).result()
        path = Path(said["record"])
        entries = json.loads(path.read_text("utf-8"))["entries"]
        audits.append(audit(path.with_suffix(".jsonl").read_text("utf-8"), entries))
    damaged = [
        " ".join(c) for c in (("records", "verify"), ("cache", "verify")) if command(folder, *c)[0]
    ]
    alive = left_behind(folder)
    wrong = [item for item in audits if item["twice"] or item["lost"]]
    passed = count == KILLS and not wrong and not damaged and not alive
    text = f"{count} kills over {len(audits)} searches; {len(wrong)} did something twice, "
    text += f"damaged: {damaged or 'nothing'}, left behind: {alive or 'nothing'}"
    return Bar(name="kills", passed=passed, said=text, data={"kills": count, "audits": audits})


def crowd(folder: Path, options: argparse.Namespace) -> Bar:
    """Sixteen processes that search for one problem on one cold cache."""
    (alone,) = Search(folder / "one", [FORWARD]).result()
    began = time.monotonic()
    started = [Search(folder / "all", [FORWARD]) for _ in range(CROWD)]
    said = [search.result()[0] for search in started]
    seconds = time.monotonic() - began
    compiled = Counter(name for item in said for name in item["compiled"])
    twice = [name for name, times in compiled.items() if times > 1]
    statuses = Counter(item["status"] for item in said)
    records = len(list((folder / "all" / "records").glob("*/*/*.json")))
    ratio = seconds / alone["wall"]
    passed = not twice and statuses == {"measured": 1, "recorded": CROWD - 1} and records == 1
    text = (
        f"{seconds:.1f} s for {CROWD}, {alone['wall']:.1f} for one: {ratio:.2f} of {CROWD_BAR:g}; "
    )
    text += (
        f"{len(compiled)} kernels, {len(twice)} compiled twice; {dict(statuses)}, {records} records"
    )
    data = {"one": alone, "all": said, "seconds": seconds}
    return Bar(name="crowd", passed=passed and ratio <= CROWD_BAR, said=text, data=data)


def repeat(folder: Path, options: argparse.Namespace) -> Bar:
    """Fresh processes that tune the same problems, with kernels built and no records."""
    Search(folder, REPEATED).result()
    runs = list(options.before.get("repeat", {}).get("data", {}).get("runs", ()))
    for _ in range(options.repeats):
        shutil.rmtree(folder / "records")
        runs.append(Search(folder, REPEATED).result())
    apart = [disagreements(of_problem) for of_problem in zip(*runs, strict=True)]
    picks = [len({run["pick"] for run in of_problem}) for of_problem in zip(*runs, strict=True)]
    text = f"{len(runs)} processes of {REPEATS}, picks a problem {picks}, "
    text += f"{sum(map(len, apart))} of them not tied with the usual one"
    passed = len(runs) >= REPEATS and not any(apart)
    return Bar(name="repeat", passed=passed, said=text, data={"runs": runs, "apart": apart})


def _sweep(name: str, seconds: int) -> Callable[[Path, argparse.Namespace], Bar]:
    def sweep(folder: Path, options: argparse.Namespace) -> Bar:
        """A bring-up with a budget."""
        limit = ("--budget-seconds", str(seconds), "--output", str(folder / "files"))
        _, said = command(folder / "cache", "bring-up", *limit)
        problems = said.get("problems", [])
        settled = sum(item["status"] in TIMED for item in problems)
        took = said.get("seconds", {}).get("total", 0.0)
        text = f"{settled} of {len(problems)} picks in {took:.0f} s; at least {SWEEP_BARS[seconds]}"
        passed = settled >= SWEEP_BARS[seconds] and took <= 1.05 * seconds
        return Bar(name=name, passed=passed, said=text + said.get("error", ""), data=said)

    return sweep


def first(folder: Path, options: argparse.Namespace) -> Bar:
    """The first calls of processes that have kernels at hand; imports and the context are outside the figures."""
    variables = first_call.install(first_call.export(folder / "bundle"), folder)
    caches = (folder / f"cache{index}" for index in range(first_call.REPEATS))
    calls = [first_call.first_call(cache, first_call.SHAPE, **variables) for cache in caches]
    medians = {way: median(call[way] for call in calls) for way in first_call.WAYS}
    right = all(call["ok"] and call["finite"] for call in calls)
    text = ", ".join(f"{way} {1e3 * seconds:.1f} ms" for way, seconds in medians.items())
    passed = right and max(medians.values()) <= FIRST_BAR
    said = f"{text} of {1e3 * FIRST_BAR:g}{'' if right else '; wrong results'}"
    return Bar(name="first", passed=passed, said=said, data={"calls": calls})


BARS: dict[str, Callable[[Path, argparse.Namespace], Bar]] = {
    "prove": prove,
    "budget": budget,
    "cold": cold,
    "kills": kills,
    "crowd": crowd,
    "repeat": repeat,
    "sweep": _sweep("sweep", 150),
    "whole-sweep": _sweep("whole-sweep", 540),
    "first": first,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure bars; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bars_search", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", nargs="+", choices=BARS, default=list(BARS), metavar="BAR")
    parser.add_argument("--repeats", type=positive, default=REPEATS, help="processes of repeat")
    parser.add_argument("--extend", action="store_true", help="add those of repeat to the file's")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    options = parser.parse_args(arguments)
    try:
        detect(0)
    except UnsupportedArchitectureError as error:
        print(error)
        return 2
    bars: dict[str, Any] = {}
    if options.output.exists():
        bars = json.loads(options.output.read_text("utf-8"))["bars"]
    options.before = bars if options.extend else {}
    for name in options.only:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            try:
                bar = BARS[name](Path(temporary), options)
            except (RuntimeError, OSError, ValueError, LookupError) as error:
                bar = Bar(name=name, passed=False, said=f"{type(error).__name__}: {error}", data={})
        bars[name] = {**asdict(bar), "seconds": time.monotonic() - began}
        print(f"{'pass' if bar.passed else 'MISS'} {name}: {bar.said}", flush=True)
        environment = collect(0).to_json()
        write_json(options.output, {"environment": environment, "bars": bars})
    return 0 if all(bars[name]["passed"] for name in options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
