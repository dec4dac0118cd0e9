"""The import graph, read from the sources: the order of the layers, and the modules that may import torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "attention_autotuner"
ROOTS = {
    f"{PACKAGE}.arch": REPOSITORY / "arch",
    f"{PACKAGE}.codegen": REPOSITORY / "codegen",
    f"{PACKAGE}.templates": REPOSITORY / "templates",
    PACKAGE: REPOSITORY / "python" / PACKAGE,
}

# The longest matching prefix decides. A module may import its own layer and those before it.
LAYERS = {
    "errors": 0,
    "logs": 0,
    "settings": 0,
    "version": 0,
    "templates": 0,
    "core": 0,
    "operations.registry": 0,
    "operations.attention.problem": 0,
    "operations.retention.problem": 0,
    "operations.retnet.problem": 0,
    "arch": 1,
    "kernels": 2,
    "codegen": 3,
    "operations": 4,
    "reference": 4,
    "serving.loader": 4,
    "tuning": 5,
    "tuned": 5,
    "serving": 6,
    "api": 7,
    "compat": 8,
    "cli": 8,
    "__main__": 8,
}
# A problem needs its operation and a policy its kernels: both are registered in later layers and imported on first use.
LAZY = {
    ("core.problem", "operations.registry"),
    ("arch.policy", "kernels.registry"),
}
MAY_IMPORT_TORCH = (
    "api",
    "compat",
    "operations",
    "reference",
    "serving.loader",
    "tuning.calls",
    "tuning.function_records",
    "tuning.function_search",
    "tuning.function_values",
    "tuning.functions",
    "tuning.measure",
    "tuning.remote",
    "tuning.ranks",
    "tuning.verify",
)
MAY_IMPORT_CUPY = ("tuning.cupy_tasks",)
MAY_NOT_IMPORT_TORCH = ("operations.registry", "operations.params")


def modules() -> dict[str, Path]:
    """Every module of the package by its full name."""
    paths: dict[str, Path] = {}
    for prefix, root in ROOTS.items():
        for path in sorted(root.rglob("*.py")):
            names = list(path.relative_to(root).with_suffix("").parts)
            if names[-1] == "__init__":
                names.pop()
            paths[".".join([prefix, *names])] = path
    return paths


MODULES = modules()


def layer(name: str) -> int:
    """The layer of a module, by its name inside the package."""
    names = name.split(".")
    for length in range(len(names), 0, -1):
        if ".".join(names[:length]) in LAYERS:
            return LAYERS[".".join(names[:length])]
    raise AssertionError(f"{name} belongs to no layer; add it to LAYERS")


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(name: str, path: Path) -> Iterator[str]:
    """Full names of the imports of a module, including those inside functions."""
    base = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parent = ".".join(base.split(".")[: len(base.split(".")) - node.level + 1])
                origin = f"{parent}.{origin}".rstrip(".")
            for alias in node.names:
                submodule = f"{origin}.{alias.name}"
                yield submodule if submodule in MODULES else origin


def inside(name: str) -> str:
    """A module's name without the package, empty for the package itself and for foreign modules."""
    return name.removeprefix(PACKAGE + ".") if name.startswith(PACKAGE + ".") else ""


def test_the_graph_includes_every_form_of_import() -> None:
    assert f"{PACKAGE}.arch.policy" in MODULES
    assert f"{PACKAGE}.core.problem" in MODULES
    imported = set(imports(f"{PACKAGE}.arch.policy", MODULES[f"{PACKAGE}.arch.policy"]))
    assert f"{PACKAGE}.core.candidate" in imported
    assert f"{PACKAGE}.arch.spec" in imported
    assert f"{PACKAGE}.errors" in imported


@pytest.mark.parametrize("name", [name for name in MODULES if name != PACKAGE])
def test_a_module_imports_only_its_own_layer_and_those_before(name: str) -> None:
    for imported in imports(name, MODULES[name]):
        if not inside(imported):
            assert imported != PACKAGE, f"{name} imports the package's public API from inside"
            continue
        if (inside(name), inside(imported)) in LAZY:
            continue
        assert layer(inside(imported)) <= layer(inside(name)), f"{name} imports {imported}"


@pytest.mark.parametrize("name", [name for name in MODULES if f"{PACKAGE}.api." in name])
def test_a_public_function_imports_no_other_operation(name: str) -> None:
    operation = inside(name).split(".")[1]
    for imported in map(inside, imports(name, MODULES[name])):
        if imported.startswith("api."):
            assert imported.split(".")[1] in (operation, "shared"), f"{name} imports {imported}"


@pytest.mark.parametrize("name", MODULES)
def test_torch_and_cupy_are_imported_only_where_tensors_are_handled(name: str) -> None:
    allowed = any(
        inside(name) == prefix or inside(name).startswith(prefix + ".")
        for prefix in MAY_IMPORT_TORCH
    ) and not inside(name).startswith(MAY_NOT_IMPORT_TORCH)
    foreign = {imported.split(".")[0] for imported in imports(name, MODULES[name])}
    assert allowed or "torch" not in foreign
    assert "cupy" not in foreign or inside(name).startswith(MAY_IMPORT_CUPY)


@pytest.mark.parametrize("name", MODULES)
def test_imports_inside_the_package_are_relative(name: str) -> None:
    for node in nodes(MODULES[name]):
        if isinstance(node, ast.Import):
            assert all(not alias.name.startswith(PACKAGE) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert not (node.module or "").startswith(PACKAGE)


@pytest.mark.parametrize(
    "statement",
    [
        f"import {PACKAGE}",
        f"import {PACKAGE}.arch",
        f"import {PACKAGE}.codegen.render, {PACKAGE}.codegen.build, {PACKAGE}.codegen.store",
        f"import {PACKAGE}.kernels.cost_model, {PACKAGE}.tuning.records",
        f"import {PACKAGE}.operations.registry, {PACKAGE}.serving.runtime",
        f"import {PACKAGE}.cli",
    ],
)
def test_modules_without_tensors_do_not_load_torch(statement: str) -> None:
    program = (
        f"import sys; {statement}; sys.exit(bool({{'torch', 'cupy', 'numpy'}} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or "torch, cupy or numpy was imported"
