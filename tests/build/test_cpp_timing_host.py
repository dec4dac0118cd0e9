"""Around the timings of the C++ benchmarks: memory laid out as by torch, and rests between rounds."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_autotuner.operations.shared.launching import GUARD
from attention_autotuner.tuning import sampling
from tests.cpp_programs import FAKE_KERNELS, ROOT, ask, compile_library, run

pytestmark = pytest.mark.build

CPP = ROOT / "benchmarks" / "cpp"
MIB = 1 << 20


def placed(probe: Path, *sizes: int) -> list[tuple[int, int]]:
    """Segment and offset of pieces of a pool."""
    done = ask(probe, stdin="place " + " ".join(map(str, sizes)) + "\n")
    pairs = (word.split(":") for word in done.stdout.split())
    return [(int(segment), int(offset)) for segment, offset in pairs]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # Multiples of 512 bytes, none of them empty.
        ([1, 512, 513, 0, 7], [(0, 0), (0, 512), (0, 1024), (0, 2048), (0, 2560)]),
        # Up to 1 MiB, two to a segment; a longer one goes elsewhere, and a short one fills what is left.
        ([MIB, MIB, MIB, MIB + 1, 4096], [(0, 0), (0, MIB), (1, 0), (2, 0), (1, MIB)]),
        # Below 10 MiB, segments of 20 MiB; from there on one of its own, rounded up to 2 MiB.
        ([9 * MIB, 9 * MIB, 9 * MIB], [(0, 0), (0, 9 * MIB), (1, 0)]),
        ([10 * MIB, 11 * MIB, 2 * MIB], [(0, 0), (1, 0), (2, 0)]),
        # The rest of another segment serves where it is long enough, the shortest such rest first.
        ([8 * MIB, 11 * MIB, 2 * MIB], [(0, 0), (0, 8 * MIB), (1, 0)]),
        ([2 * MIB, 19 * MIB, 3 * MIB, 17 * MIB], [(0, 0), (1, 0), (0, 2 * MIB), (2, 0)]),
        ([2 * MIB, 10 * MIB + 1, 2 * MIB - 512], [(0, 0), (0, 2 * MIB), (0, 12 * MIB + 512)]),
        ([9 * MIB, 19 * MIB - 512, 3 * MIB, MIB + 1], [(0, 0), (1, 0), (0, 9 * MIB), (1, 19 * MIB - 512)]),
        ([2 * MIB, 18 * MIB + 512, MIB + 1, MIB + 1], [(0, 0), (1, 0), (1, 18 * MIB + 512), (0, 2 * MIB)]),
    ],
)  # fmt: skip
def test_tensors_lie_where_torch_would_lay_them(
    cpp_programs: Path, sizes: list[int], expected: list[tuple[int, int]]
) -> None:
    assert placed(cpp_programs / "probe", *sizes) == expected


def test_the_layout_is_that_of_the_installed_torch() -> None:
    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    if not header.is_file():
        pytest.skip(f"this torch ships no {header.name}")
    pattern = r"constexpr size_t (k\w+) = (\d+);"
    theirs = dict(re.findall(pattern, header.read_text(encoding="utf-8")))
    ours = dict(re.findall(pattern, (CPP / "pool.cpp").read_text(encoding="utf-8")))
    shared = ours.keys() & theirs.keys()
    assert {"kMinBlockSize", "kSmallSize", "kSmallBuffer", "kRoundLarge"} <= shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_outputs_have_the_guards_of_python() -> None:
    (guard,) = re.findall(r"constexpr size_t kGuard = (\d+);", (CPP / "case.cpp").read_text())
    assert int(guard) == GUARD


def test_a_graph_holds_whole_rotations_as_in_python(cpp_programs: Path) -> None:
    cases = [
        (once, sets)
        for once in (0.5, 6.25, 8.3, 11.5, 11.9, 12.4, 12.6, 29.0, 49.9)
        for sets in (1, 2, 5, 8, 24, 31, 32)
    ]
    asked = "".join(f"launches {once} {sets}\n" for once, sets in cases)
    answers = [int(line) for line in ask(cpp_programs / "probe", stdin=asked).stdout.splitlines()]
    assert answers == [sampling.launches_per_replay(once, sets) for once, sets in cases]
    for (_, sets), launches in zip(cases, answers, strict=True):
        assert launches % sets == 0
        assert sets <= launches <= sampling.MAX_LAUNCHES


def test_the_gpu_rests_between_rounds_when_asked(cpp_programs: Path, tmp_path: Path) -> None:
    library = compile_library(tmp_path, replace(FAKE_KERNELS[0], options=("-DNO_WORK",)))
    output = tmp_path / "out.json"
    command: list[str | Path] = [cpp_programs / "benchmarks" / "bench_attention"]
    command += ["--library", library, "--samples", "0", "--seqlen", "64", "--batch", "1"]
    command += ["--heads", "1", "--dim-qk", "64", "--dim-v", "48", "--json", output]
    command += ["--rounds", "600", "--rest", "100"]
    began = time.monotonic()
    run(*command)
    took = time.monotonic() - began
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["protocol"]["rest"] == 100
    (result,) = document["results"]
    sample = result["median_us"] * 1e-6 * result["launches_a_round"]
    assert took > 599 / 2 * 100 * sample  # half of the rounds took at least the median
