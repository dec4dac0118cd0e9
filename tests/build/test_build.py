from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from attention_autotuner.codegen import artifact as artifact_module
from attention_autotuner.codegen import build as build_module
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.project import Project, configure
from attention_autotuner.codegen.render import RenderedKernel, abi_version, render
from attention_autotuner.codegen.sass import main_loops
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import Toolchain, find_disassembler, find_toolchain
from attention_autotuner.core import abi
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed, Outcome
from attention_autotuner.errors import ToolchainError
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs

pytestmark = pytest.mark.build

TARGET = BuildTarget(arch="80")
CANDIDATE = Candidate(
    dtype="fp16",
    padded_dim_qk=64,
    padded_dim_v=64,
    knobs=ForwardKnobs(block_m=64, block_n=64, warps_m=4, num_stages=2, k_slice=64),
)
# A main loop around mma.sync that keeps a value in local memory.
SPILLING = """
#include <cstdint>
__global__ void spilling(float* out, uint32_t const* in, int count) {
  float d[4] = {};
  volatile float local[8];
  for (int i = 0; i < count; i++) {
    uint32_t const* x = in + 8 * i;
    local[i & 7] = d[0];
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]));
    d[1] += local[(i * 3) & 7];
  }
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def _by_hand(name: str, text: str) -> RenderedKernel:
    return RenderedKernel(candidate=CANDIDATE, name=name, text=text)


def _trivial(name: str, comment: str = "") -> RenderedKernel:
    """A unit that compiles in a second; the name makes its text and so its digest distinct."""
    return _by_hand(
        name, f"// {comment}\n__global__ void {name}(float* x) {{ x[threadIdx.x] *= 2; }}\n"
    )


REAL = render(CANDIDATE)
BROKEN = _by_hand("broken", "// does not parse\nint x = ;\n")
UNDEFINED = _by_hand("undefined", 'void nobody();\nextern "C" void somebody() { nobody(); }\n')
KERNELS = [REAL, BROKEN, _by_hand("spilling", SPILLING), UNDEFINED, _trivial("plain"), REAL]


@dataclass
class Batch:
    """One build of :data:`KERNELS`, which every test reads."""

    store: Store
    results: list[Artifact | Outcome]
    progress: list[tuple[int, int, str, float]]

    def artifact(self, name: str) -> Artifact:
        (stored,) = {
            id(r): r for r in self.results if isinstance(r, Artifact) and r.name == name
        }.values()
        return stored


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    return find_toolchain()


@pytest.fixture(scope="session")
def batch(tmp_path_factory: pytest.TempPathFactory, toolchain: Toolchain) -> Batch:
    # A space in the path, as in home folders of some people.
    store = Store(tmp_path_factory.mktemp("shared") / "kernel cache")
    progress: list[tuple[int, int, str, float]] = []
    results = build(
        KERNELS,
        TARGET,
        toolchain=toolchain,
        store=store,
        progress=lambda *step: progress.append(step),
    )
    return Batch(store=store, results=results, progress=progress)


def _kinds(results: list[Artifact | Outcome]) -> list[str]:
    return [r.kind if isinstance(r, Outcome) else "artifact" for r in results]


def test_one_failure_stops_no_other(batch: Batch) -> None:
    assert _kinds(batch.results) == [
        "artifact",
        "build_failed",
        "artifact",
        "build_failed",
        "artifact",
        "artifact",
    ]
    assert batch.results[0] is batch.results[5]
    states = [entry.state for entry in batch.store.ls()]
    assert states == ["built"] * 3 + ["failed"] * 2
    assert not list((batch.store.root / "staging").iterdir())


def test_progress_counts_every_miss_once(batch: Batch) -> None:
    assert [step[0] for step in batch.progress] == [1, 2, 3, 4, 5]
    assert {step[1] for step in batch.progress} == {5}
    assert {step[2] for step in batch.progress} == {kernel.name for kernel in KERNELS}
    assert all(step[3] > 0 for step in batch.progress)


@pytest.mark.parametrize(
    ("index", "reason", "logged"),
    [
        (1, r"kernel\.cu\(2\): error: expected an expression", "int x = ;"),
        (3, "undefined reference to `nobody", "ld returned 1"),
    ],
)
def test_failures_come_with_reason_and_log(
    batch: Batch, index: int, reason: str, logged: str
) -> None:
    failed = batch.results[index]
    assert isinstance(failed, BuildFailed)
    assert re.search(reason, failed.reason)
    log = Path(failed.log)
    assert logged in log.read_text()
    assert log.with_name("kernel.cu").read_text() == KERNELS[index].text


def test_the_store_answers_the_second_time(
    batch: Batch, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "configure", None)  # a call would be a TypeError
    assert build(KERNELS, TARGET, toolchain=toolchain, store=batch.store) == batch.results


def test_failures_are_compiled_again_on_request(batch: Batch, toolchain: Toolchain) -> None:
    seen: list[str] = []
    again = build(
        [BROKEN],
        TARGET,
        toolchain=toolchain,
        store=batch.store,
        retry_failed=True,
        progress=lambda done, total, name, seconds: seen.append(name),
    )
    assert seen == ["broken"]
    assert again == [batch.results[1]]


def test_the_record_holds_what_the_compiler_said(batch: Batch, toolchain: Toolchain) -> None:
    artifact = batch.artifact(REAL.name)
    assert 32 < artifact.report.registers <= 255
    assert len(artifact.report.kernels) >= 1
    assert artifact.toolchain == toolchain.identity()
    assert artifact.target == TARGET
    log = artifact.path.with_name("build.log").read_text()
    assert f"Used {artifact.report.registers} registers" in log


def test_one_candidate_stays_within_time_and_memory(batch: Batch) -> None:
    artifact = batch.artifact(REAL.name)
    assert artifact.build_seconds <= 25
    assert 50 << 20 < artifact.build_peak_bytes <= 4 << 30


def test_exported_symbols_are_the_abi_and_nothing_else(batch: Batch) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", batch.artifact(REAL.name).path],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert {line.split()[-1] for line in listed.splitlines()} == {
        abi.SYMBOL_PREFIX + name for name in abi.PROTOTYPES
    }


def test_needed_libraries_are_those_of_every_linux(batch: Batch) -> None:
    listed = subprocess.run(
        ["readelf", "-d", batch.artifact(REAL.name).path],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    needed = set(re.findall(r"Shared library: \[(.*?)\]", listed))
    assert not any("cuda" in name or "nv" in name for name in needed)


def test_the_library_loads_and_describes_itself_without_a_gpu(batch: Batch) -> None:
    library = ctypes.CDLL(str(batch.artifact(REAL.name).path))
    assert library.attention_autotuner_abi_version() == 1002 < abi_version()  # all that it needs
    info = abi.KernelInfo(struct_size=ctypes.sizeof(abi.KernelInfo))
    assert library.attention_autotuner_get_kernel_info(ctypes.byref(info)) == abi.STATUS_OK
    assert info.name == CANDIDATE.name.encode()
    assert (info.padded_dim_qk, info.padded_dim_v) == (
        CANDIDATE.padded_dim_qk,
        CANDIDATE.padded_dim_v,
    )
    assert (info.block_m, info.block_n) == (CANDIDATE.knobs.block_m, CANDIDATE.knobs.block_n)
    assert info.num_threads == CANDIDATE.knobs.num_threads
    assert info.copy_bytes == CANDIDATE.copy_bytes


def test_spills_in_main_loops_are_seen(batch: Batch) -> None:
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    spilling, real = batch.artifact("spilling"), batch.artifact(REAL.name)
    assert spilling.report.loop_spills is True
    assert spilling.report.stack_bytes >= 32
    assert any(
        loop.spills for loops in main_loops(spilling.path, disassembler).values() for loop in loops
    )
    assert real.report.loop_spills is False
    assert not any(
        loop.spills for loops in main_loops(real.path, disassembler).values() for loop in loops
    )


def _embedded(path: Path, kind: str) -> list[str]:
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    done = subprocess.run(
        [disassembler, f"--list-{kind}", path], check=False, capture_output=True, text=True
    )
    return re.findall(r"sm_\w+", done.stdout)


def test_ptx_travels_beside_the_machine_code_where_asked(
    batch: Batch, toolchain: Toolchain, tmp_path: Path, new_store: Callable[[Path], Store]
) -> None:
    both = batch.artifact("plain").path
    assert (_embedded(both, "elf"), _embedded(both, "ptx")) == (["sm_80"], ["sm_80"])
    target = BuildTarget(arch="89", ptx=False)
    (native,) = build(
        [_trivial("plain")], target, toolchain=toolchain, store=new_store(tmp_path / "cache")
    )
    assert isinstance(native, Artifact)
    assert (_embedded(native.path, "elf"), _embedded(native.path, "ptx")) == (["sm_89"], [])


def _commands(root: Path, target: BuildTarget, toolchain: Toolchain, store: Store) -> str:
    """The commands that Ninja would run for one kernel, with the private folder's name taken out."""
    project = Project(root=root, target=target, toolchain=toolchain, store=store)
    for folder in (project.sources, project.logs, project.temporary):
        folder.mkdir(parents=True)
    (project.sources / "k0.cu").write_text(_trivial("plain").text)
    configure(project)
    listed = subprocess.run(
        [toolchain.ninja, "-C", project.build, "-t", "commands"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return listed.replace(str(root), "ROOT")


def test_what_cmake_learnt_is_used_again_and_changes_nothing(
    tmp_path: Path, toolchain: Toolchain
) -> None:
    store = Store(tmp_path / "cache")
    fresh = _commands(tmp_path / "1", TARGET, toolchain, store)
    (kept,) = (store.root / "cmake").iterdir()
    again = _commands(tmp_path / "2", TARGET, toolchain, store)
    assert again == fresh
    # Where CMake asks a compiler what it is, it leaves the program that it asked with.
    asked = "build/CMakeFiles/*/CompilerIdCUDA"
    assert list((tmp_path / "1").glob(asked))
    assert not list((tmp_path / "2").glob(asked))
    # Damage is noticed and repaired.
    (kept / "CMakeCUDACompiler.cmake").write_text("message(FATAL_ERROR damaged)\n")
    assert _commands(tmp_path / "3", TARGET, toolchain, store) == fresh
    assert "damaged" not in (kept / "CMakeCUDACompiler.cmake").read_text()


@pytest.mark.parametrize("arch", ["80", "89", "90", "90a"])
@pytest.mark.parametrize("ptx", [True, False])
def test_the_flags_in_the_identity_are_those_of_the_command(
    batch: Batch, tmp_path: Path, toolchain: Toolchain, arch: str, ptx: bool
) -> None:
    target = BuildTarget(arch=arch, ptx=ptx)
    commands = _commands(tmp_path, target, toolchain, batch.store).replace('"', "")
    generated = re.findall(r"--generate-code=\S+", commands)
    assert {flag.replace("[", "").replace("]", "") for flag in generated} == {
        flag.replace("[", "").replace("]", "") for flag in target.flags()
    }
    for flag in ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas=-v", "-z,defs"):
        assert flag in commands
    assert "-fvisibility=hidden" in commands
    assert "-lcudart_static" in commands
    assert "fast" not in commands
    assert "lineinfo" not in commands


@pytest.mark.parametrize("arch", ["", "8.0", "sm_80", "80 90", "8", "80x"])
def test_a_target_that_is_none(arch: str) -> None:
    with pytest.raises(ValueError, match="arch"):
        BuildTarget(arch=arch)


def test_tools_that_are_gone(tmp_path: Path, toolchain: Toolchain) -> None:
    store = Store(tmp_path / "cache")
    for name in ("nvcc", "cmake"):
        gone = replace(toolchain, **{name: tmp_path / "gone"})  # type: ignore[arg-type]
        with pytest.raises(ToolchainError, match="gone"):
            build([_trivial("one")], TARGET, toolchain=gone, store=store)
    failing = tmp_path / "broken"
    failing.write_text("#!/bin/sh\necho I am no compiler; exit 1\n")
    failing.chmod(0o755)
    with pytest.raises(ToolchainError, match="CMake cannot set up a build"):
        build([_trivial("one")], TARGET, toolchain=replace(toolchain, nvcc=failing), store=store)
    assert store.ls() == []
    assert not list((store.root / "staging").iterdir())


def test_a_header_edited_during_the_build_is_noticed(
    tmp_path: Path,
    toolchain: Toolchain,
    monkeypatch: pytest.MonkeyPatch,
    new_store: Callable[[Path], Store],
) -> None:
    store, real_configure = new_store(tmp_path / "cache"), configure

    def edit(*arguments: object, **options: object) -> None:
        real_configure(*arguments, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(artifact_module, "kernel_digest", lambda kernel: "another")

    monkeypatch.setattr(build_module, "configure", edit)
    (result,) = build([_trivial("one")], TARGET, toolchain=toolchain, store=store)
    assert isinstance(result, BuildFailed)
    assert "header changed" in result.reason
    assert store.ls() == []


def test_a_damaged_artifact_is_built_again(
    tmp_path: Path,
    toolchain: Toolchain,
    caplog: pytest.LogCaptureFixture,
    new_store: Callable[[Path], Store],
) -> None:
    store = new_store(tmp_path / "cache")
    (first,) = build([_trivial("one")], TARGET, toolchain=toolchain, store=store)
    assert isinstance(first, Artifact)
    first.path.write_bytes(first.path.read_bytes()[:-100])
    (second,) = build([_trivial("one")], TARGET, toolchain=toolchain, store=store)
    assert isinstance(second, Artifact)
    assert "damaged" in caplog.text
    ctypes.CDLL(str(second.path))
    assert store.verify() == []


def test_cmake_alone_builds_a_folder_of_kernels(
    tmp_path: Path, toolchain: Toolchain, repository: Path
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "plain.cu").write_text(_trivial("plain").text)
    demand = (
        "#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)\n#error 90a\n#endif\n"
    )
    (sources / "own.cu").write_text(demand + _trivial("own").text)
    (sources / "own.architecture").write_text("90a-real\n")
    configured = subprocess.run(
        [
            toolchain.cmake, "-G", "Ninja", "-S", repository, "-B", tmp_path / "build",
            f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}", f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc}",
            f"-DCUTLASS_DIR={toolchain.cutlass_include}", "-DCMAKE_CUDA_ARCHITECTURES=80",
            f"-DATTENTION_AUTOTUNER_KERNEL_DIR={sources}",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert configured.returncode == 0, configured.stdout + configured.stderr
    subprocess.run([toolchain.ninja, "-C", tmp_path / "build"], check=True, capture_output=True)
    for name in ("plain", "own"):
        ctypes.CDLL(str(tmp_path / "build" / f"{name}.so"))
