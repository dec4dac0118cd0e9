"""The digest of machine code, on units that compile in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attention_autotuner.arch import A100
from attention_autotuner.codegen import build as build_module
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.code_digest import PREFIX, code_digest, comparable
from attention_autotuner.codegen.render import RenderedKernel
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_disassembler, find_toolchain
from attention_autotuner.core.abi import KernelInfo
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ToolchainError

pytestmark = pytest.mark.build

CANDIDATE = A100().default(Problem())
SCALING = """
namespace {space} {{
{variable}__constant__ float factors[4] = {{1, 2, 3, 4}};
template <int N>
__global__ void {name}(float* x) {{ x[threadIdx.x] *= {factor} + factors[N]; }}
template __global__ void {name}<1>(float*);
template __global__ void {name}<2>(float*);
inline int half_of(int {local}) {{ return {local} / 2; }}
}}
extern "C" int half(int x) {{ return {space}::half_of(x){host}; }}
extern "C" char const* name() {{ return "{name}"; }}
extern "C" __attribute__((visibility("default")))
int attention_autotuner_get_kernel_info(int* info) {{ return (info[{number}] = {smem}) * 0; }}
"""
USUAL = {"space": "ours", "name": "scale", "local": "x", "factor": "7", "host": "", "smem": "512"}
USUAL["variable"] = ""
USUAL["number"] = str(KernelInfo.dynamic_smem_bytes.offset // 4)
VARIANTS: dict[str, dict[str, str]] = {
    "usual": {},
    "renamed": {"space": "another::one", "name": "multiply_by_some_factor", "local": "number"},
    "device": {"factor": "8"},
    "host": {"host": " + 1"},
    "launch": {"smem": "1024"},
    "variable": {"variable": "__device__ int unused[2]; "},
}
needs_disassembler = pytest.mark.skipif(
    find_disassembler() is None, reason="needs cuobjdump and nvdisasm"
)


def kernel(name: str) -> RenderedKernel:
    text = SCALING.format(**(USUAL | VARIANTS[name]))
    return RenderedKernel(candidate=CANDIDATE, name=name, text=text)


def built(store: Store, target: BuildTarget, *names: str) -> list[Artifact]:
    results = build(list(map(kernel, names)), target, toolchain=find_toolchain(), store=store)
    artifacts = [result for result in results if isinstance(result, Artifact)]
    assert len(artifacts) == len(names), results
    return artifacts


@needs_disassembler
def test_names_and_ptx_do_not_count_and_code_does(kernel_store: Store) -> None:
    store = kernel_store
    usual, renamed, device, host, launch, variable = built(store, BuildTarget(arch="80"), *VARIANTS)
    assert usual.code_digest is not None
    assert usual.code_digest == comparable(usual.code_digest)
    assert len(usual.code_digest) == len(PREFIX) + 64
    assert renamed.code_digest == host.code_digest == usual.code_digest
    assert variable.code_digest == usual.code_digest
    assert renamed.host_digest == device.host_digest == usual.host_digest != host.host_digest
    assert len({item.kernel_digest for item in (usual, renamed, host)}) == 3
    assert len({item.code_digest for item in (usual, device, launch)}) == 3
    assert store.lookup(usual.name, usual.digest) == usual
    (bare,) = built(store, BuildTarget(arch="80", ptx=False), "usual")
    assert bare.code_digest == usual.code_digest
    assert bare.digest != usual.digest


def test_without_a_disassembler_it_stays_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_store: Callable[[Path], Store]
) -> None:
    monkeypatch.setattr(build_module, "find_disassembler", lambda: None)
    (artifact,) = built(new_store(tmp_path / "cache"), BuildTarget(arch="80"), "usual")
    assert artifact.code_digest is None


@needs_disassembler
def test_what_is_no_object_file_is_named(tmp_path: Path) -> None:
    disassembler = find_disassembler()
    assert disassembler is not None
    path = tmp_path / "kernel.o"
    path.write_bytes(b"no object file")
    with pytest.raises(ToolchainError, match=r"kernel\.o"):
        code_digest(path, path, disassembler)
