"""The registry of operations: the modules of every folder, and a new operation with one word in the registry."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from attention_autotuner.core import abi, problem
from attention_autotuner.core.operation import Semantics
from attention_autotuner.core.problem import Mask, Problem
from attention_autotuner.operations.bindings import make_inputs, ways_of
from attention_autotuner.operations.params import params_of, struct_of
from attention_autotuner.operations.registry import NAMES, OPERATIONS, Operation
from attention_autotuner.tuning.verify import variants

MODULES = ("problem", "params", "inputs", "reference")


def test_every_folder_holds_an_operation(repository: Path) -> None:
    package = repository / "python" / "attention_autotuner"
    folders = {path.parent.name for path in (package / "operations").glob("*/problem.py")}
    assert folders == set(NAMES) == set(OPERATIONS)
    for name, operation in OPERATIONS.items():
        assert operation.semantics.op == operation.name == name
        for module in MODULES:
            assert operation.module(module).__name__.endswith(f"operations.{name}.{module}")
        assert (package / "api" / name / "function.py").exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_params_come_from_the_folder(name: str, direction: problem.Direction) -> None:
    mask: Mask = OPERATIONS[name].semantics.default_mask
    causal = OPERATIONS[name].semantics.is_causal(mask)
    asked = Problem(op=name, direction=direction, mask=mask, causal=causal)
    written = {"attention": "Attention", "retnet": "RetNet", "retention": "Retention"}[name]
    assert struct_of(asked) is getattr(abi, f"{written}{direction.capitalize()}Params")
    params = params_of(asked, 0.25)
    assert (params.batch, params.dim_v) == (asked.batch, asked.dim_v)
    assert 0.25 in {params.softmax_scale if name == "attention" else params.scale}
    assert ways_of(asked)


def test_the_registry_needs_no_torch() -> None:
    program = (
        "import sys; from attention_autotuner.operations.registry import OPERATIONS; "
        "[o.module('params') for o in OPERATIONS.values()]; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0


def test_a_new_operation_needs_only_its_folder_and_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    semantics = Semantics(op="toy", scores={"none": "softmax"})
    borrowed = {module: OPERATIONS["attention"].module(module) for module in ("params", "inputs")}
    for module, borrowed_module in borrowed.items():
        toy = types.ModuleType(f"attention_autotuner.operations.toy.{module}")
        vars(toy).update(vars(borrowed_module) | {"__name__": toy.__name__})
        monkeypatch.setitem(sys.modules, toy.__name__, toy)
    package = types.ModuleType("attention_autotuner.operations.toy")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(OPERATIONS, "toy", Operation(name="toy", semantics=semantics))
    struct = f"{abi.SYMBOL_PREFIX}toy_forward_params"  # which the header of the ABI has
    monkeypatch.setitem(abi.STRUCTS, struct, abi.AttentionForwardParams)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(problem, "operations", lambda: tuple(OPERATIONS))
        patched.setattr(
            problem, "_semantics", lambda: {name: o.semantics for name, o in OPERATIONS.items()}
        )
        asked = Problem(op="toy", batch=1, heads_q=2, heads_kv=1, seqlen_q=32, seqlen_k=32)
        assert asked.describe().startswith("toy forward")
        assert params_of(asked).seqlen_q == 32
        assert make_inputs(asked, seed=0, device=torch.device("cpu")).q.shape == (1, 2, 32, 128)
        shapes = variants(asked, block_m=64, block_n=64, num_sms=1)
        assert [shape.causal for shape in shapes] == [False, False, True]


def test_operations_are_named_only_in_their_folders(repository: Path) -> None:
    """No ladder over the names of operations outside ``operations/``."""
    named = re.compile(r"""\bop (==|!=|in) [("'\[{]""")
    folders = [repository / "arch", repository / "codegen", repository / "python"]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        if "operations" not in path.parts:
            assert not named.search(path.read_text(encoding="utf-8")), path
