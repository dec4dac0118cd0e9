"""Compilations of bring-up: the library of peaks, read back as machine code, and kernels for GPUs unseen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.codegen.artifact import BuildTarget
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_disassembler, find_toolchain
from attention_autotuner.errors import BuildError
from attention_autotuner.tuning import peaks as peaks_module
from attention_autotuner.tuning.peaks import build_library, measure_peaks
from tests.conftest import REPOSITORY, why_no_gpu

pytestmark = pytest.mark.build

ARCHS = {"rtx3090": "86", "l40s": "89", "rtx5090": "120"}
SMALLEST = ["--only", "retention", "forward", "d64", "--compile", "1"]
BRANCH = re.compile(r"BRA(?:\.\S+)?\s+(?:\S+,\s*)?0x([0-9a-f]+)")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)

Instructions = list[tuple[int, str]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, new_store: Callable[[Path], Store]) -> Store:
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def hopper(store: Store) -> Path:
    return build_library(
        BuildTarget(arch="90a", ptx=False), toolchain=find_toolchain(), store=store
    )


@pytest.fixture(scope="module")
def functions(hopper: Path) -> dict[str, Instructions]:
    """Kernel -> its instructions."""
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    done = subprocess.run(
        [disassembler, "-sass", hopper], check=True, capture_output=True, text=True
    )
    functions = {}
    for part in done.stdout.split("Function : ")[1:]:
        name = part.split()[0]
        functions[name] = [(int(at, 16), text) for at, text in INSTRUCTION.findall(part)]
    return functions


def last_loop(instructions: Instructions) -> Counter[str]:
    """Instructions of a kernel's last loop, by the beginnings of opcodes."""
    loops = [
        (int(match[1], 16), at)
        for at, text in instructions
        if (match := BRANCH.search(text)) and int(match[1], 16) < at
    ]
    first, last = max(loops, key=lambda loop: loop[0])
    inside = [text for at, text in instructions if first <= at <= last]
    return Counter(re.sub(r"^@\S+ ", "", text).split()[0].split(".")[0] for text in inside)


@pytest.mark.parametrize(
    ("kernel", "opcode", "count", "others"),
    [
        ("8mma_loopI6__half", "HMMA", 32, 8),
        ("8mma_loopI13__nv_bfloat16", "HMMA", 32, 8),
        ("wgmma_loopI6__half", "HGMMA", 16, 64),
        ("wgmma_loopI13__nv_bfloat16", "HGMMA", 16, 64),
        ("FmaLink", "FFMA", 128, 8),
        ("ExpLink", "MUFU", 128, 136),
        ("smem_loop", "LDS", 8, 24),
        ("l2_loop", "LDG", 8, 32),
    ],
)
def test_a_loop_holds_what_it_measures_and_little_else(
    functions: dict[str, Instructions], kernel: str, opcode: str, count: int, others: int
) -> None:
    (name,) = [name for name in functions if kernel in name]
    held = last_loop(functions[name])
    assert held[opcode] == count
    assert held.total() - count <= others


def test_nothing_touches_local_memory(functions: dict[str, Instructions]) -> None:
    assert len(functions) == 12
    for name, instructions in functions.items():
        assert not any(re.match(r"(@\S+ )?(LDL|STL)", text) for _, text in instructions), name


def test_the_library_is_compiled_once(hopper: Path, store: Store) -> None:
    before = hopper.stat().st_mtime_ns
    target = BuildTarget(arch="90a", ptx=False)
    assert build_library(target, toolchain=find_toolchain(), store=store) == hopper
    assert hopper.stat().st_mtime_ns == before
    assert list((store.root / "staging").iterdir()) == []


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU here")
def test_without_a_gpu_every_peak_says_so(hopper: Path) -> None:
    peaks = measure_peaks(hopper, ["launch", "wgmma_fp16"], seconds=0.1)
    for peak in peaks.values():
        assert not isinstance(peak, peaks_module.Peak)
        assert "driver" in peak.reason or "device" in peak.reason


def test_a_compiler_that_fails_is_quoted(store: Store) -> None:
    with pytest.raises(BuildError, match=r"does not compile for 999: .*999"):
        build_library(BuildTarget(arch="999"), toolchain=find_toolchain(), store=store)


@pytest.fixture(scope="module")
def dry_runs(
    tmp_path_factory: pytest.TempPathFactory, new_store: Callable[[Path], Store]
) -> dict[str, dict[str, Any]]:
    """The JSON of a dry run for each GPU; all at once, one compilation each."""
    command = [sys.executable, "-m", "attention_autotuner", "bring-up", "--dry-run", "--json"]
    started = {}
    for name in ARCHS:
        cache = new_store(tmp_path_factory.mktemp(name)).root
        properties = REPOSITORY / "tests" / "data" / "properties" / f"{name}.json"
        started[name] = subprocess.Popen(
            [*command, "--properties", str(properties), *SMALLEST],
            env={**os.environ, "ATTENTION_AUTOTUNER_CACHE_DIR": str(cache)},
            stdout=subprocess.PIPE,
            text=True,
        )
    said = {}
    for name, process in started.items():
        text, _ = process.communicate()
        assert process.returncode == 0, text
        said[name] = json.loads(text)
    return said


@pytest.mark.parametrize("name", ARCHS)
def test_a_legal_candidate_of_an_unseen_gpu_compiles_for_it(
    dry_runs: dict[str, dict[str, Any]], name: str
) -> None:
    said = dry_runs[name]
    assert said["build_arch"] == ARCHS[name]
    (built,) = said["built"]
    assert built["fate"] == "ok"
    record = json.loads((Path(built["path"]).parent / "build.json").read_text())
    assert record["target"]["arch"] == ARCHS[name]
