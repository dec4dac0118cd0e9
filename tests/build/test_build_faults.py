"""Compilers that crash, hang, run out of memory or of time, and many callers of one."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.codegen.artifact import Artifact, artifact_digest
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import Toolchain, find_toolchain
from attention_autotuner.core.outcome import OutOfMemory, TimedOut
from attention_autotuner.errors import StoreError
from tests.build.test_build import TARGET, _kinds, _trivial

pytestmark = pytest.mark.build


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    return find_toolchain()


@pytest.fixture
def wrapped(toolchain: Toolchain, tmp_path: Path) -> Callable[[str], Toolchain]:
    """A compiler that does something else first when the source says MARK; `$source` is its path."""

    def make(action: str) -> Toolchain:
        wrapper = tmp_path / "nvcc"
        wrapper.write_text(
            '#!/bin/sh\nfor source in "$@"; do case "$source" in */k[0-9]*.cu)\n'
            f'  if grep -q MARK "$source"; then {action}; fi;;\nesac; done\n'
            f'exec {toolchain.nvcc} "$@"\n'
        )
        wrapper.chmod(0o755)
        return replace(toolchain, nvcc=wrapper)

    return make


def test_a_killed_compiler_is_out_of_memory_and_tried_once_more_alone(
    tmp_path: Path, wrapped: Callable[[str], Toolchain]
) -> None:
    store, count = Store(tmp_path / "cache"), tmp_path / "count"
    kernels = [_trivial("one", "MARK"), _trivial("two")]
    killed = wrapped(f"echo >> {count}; kill -9 $$")
    results = build(kernels, TARGET, toolchain=killed, store=store, jobs=2)
    assert _kinds(results) == ["out_of_memory", "artifact"]
    assert isinstance(results[0], OutOfMemory)
    assert "ATTENTION_AUTOTUNER_JOBS" in results[0].reason
    assert len(count.read_text()) == 2
    # It is not remembered: with memory it compiles.
    assert store.get(kernels[0], TARGET, killed) is None
    rescued = wrapped(f"test $(wc -l < {count}) -eq 3 || {{ echo >> {count}; kill -9 $$; }}")
    (first, _) = build(kernels, TARGET, toolchain=rescued, store=store, jobs=2)
    assert isinstance(first, OutOfMemory)  # a single miss has no company to shed
    (first, _) = build(kernels, TARGET, toolchain=rescued, store=store, jobs=2)
    assert isinstance(first, Artifact)


def test_a_time_limit_ends_one_kernel_alone(
    tmp_path: Path, wrapped: Callable[[str], Toolchain]
) -> None:
    store = Store(tmp_path / "cache")
    kernels = [_trivial("one", "MARK"), _trivial("two")]
    hanging = wrapped("sleep 600")
    results = build(kernels, TARGET, toolchain=hanging, store=store, timeout_seconds=10, jobs=2)
    assert _kinds(results) == ["timed_out", "artifact"]
    assert isinstance(results[0], TimedOut)
    assert "10 s" in results[0].reason
    # It is remembered while the compiler is the same file.
    assert build(kernels, TARGET, toolchain=hanging, store=store) == results
    mended = wrapped("true")
    assert _kinds(build(kernels, TARGET, toolchain=mended, store=store)) == ["artifact"] * 2


def test_a_budget_ends_compilers_and_keeps_what_came_before(
    tmp_path: Path, wrapped: Callable[[str], Toolchain]
) -> None:
    store = Store(tmp_path / "cache")
    kernels = [_trivial(f"n{n}", "MARK" + " HANG" * (n == 10)) for n in range(11)]
    slow = wrapped('if grep -q HANG "$source"; then sleep 600; else exit 1; fi')
    names: list[str] = []
    ends: list[float] = []

    def stop() -> bool:
        if len(names) == 10 and not ends:
            ends.append(time.monotonic() + 0.5)
        return bool(ends) and time.monotonic() > ends[0]

    results = build(
        kernels, TARGET, toolchain=slow, store=store, jobs=1, stop=stop,
        progress=lambda done, total, name, seconds: names.append(name),
    )  # fmt: skip
    assert time.monotonic() < ends[0] + 5.0
    assert _kinds(results) == ["build_failed"] * 10 + ["postponed"]
    assert names == [kernel.name for kernel in kernels[:10]]  # the first of them first
    assert len(store.ls()) == 10
    assert not list((store.root / "staging").iterdir())
    assert not list((store.root / "building").iterdir())
    # What another process compiles is waited for, and taken from the store.
    with store.lease(artifact_digest(kernels[10], TARGET, slow), "n10").wait():
        began = time.monotonic()
        (waited,) = build(
            kernels[10:], TARGET, toolchain=slow, store=store,
            stop=lambda: time.monotonic() > began + 0.5,
        )  # fmt: skip
    assert _kinds([waited]) == ["postponed"]


def test_many_processes_compile_each_kernel_once(
    tmp_path: Path, wrapped: Callable[[str], Toolchain]
) -> None:
    store, count = Store(tmp_path / "cache"), tmp_path / "count"
    kernels = [_trivial(name, "MARK") for name in ("one", "two", "three")]
    slow = wrapped(f"echo >> {count}; sleep 0.3; exit 1")

    def build_all(order: int) -> None:
        mine = kernels[order % 3 :] + kernels[: order % 3]
        results = build(mine, TARGET, toolchain=slow, store=store, jobs=1)
        assert _kinds(results) == ["build_failed"] * 3

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=build_all, args=(order,)) for order in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
        assert process.exitcode == 0
    assert len(count.read_text()) == 3
    assert not list((store.root / "building").iterdir())


def test_a_compiler_that_hangs_before_it_compiles_ends_with_the_budget(
    tmp_path: Path, toolchain: Toolchain
) -> None:
    wrapper = tmp_path / "nvcc"
    wrapper.write_text("#!/bin/sh\nsleep 600\n")
    wrapper.chmod(0o755)
    began = time.monotonic()
    results = build(
        [_trivial("one")],
        TARGET,
        toolchain=replace(toolchain, nvcc=wrapper),
        store=Store(tmp_path / "cache"),
        stop=lambda: time.monotonic() > began + 0.5,
    )
    assert _kinds(results) == ["postponed"]
    assert time.monotonic() - began < 10.0


def test_a_crash_of_the_compiler_is_a_failed_build(
    tmp_path: Path, wrapped: Callable[[str], Toolchain]
) -> None:
    store, crashing = Store(tmp_path / "cache"), wrapped("kill -SEGV $$")
    kernels = [_trivial("one", "MARK"), _trivial("two")]
    results = build(kernels, TARGET, toolchain=crashing, store=store, jobs=2)
    assert _kinds(results) == ["build_failed", "artifact"]
    assert "SIGSEGV" in getattr(results[0], "reason", "")
    assert store.get(kernels[0], TARGET, crashing) == results[0]  # until the compiler is another


def test_a_full_disk_is_the_stores_trouble(
    tmp_path: Path, wrapped: Callable[[str], Toolchain]
) -> None:
    store = Store(tmp_path / "cache")
    full = wrapped("echo 'fatal error: k.o: No space left on device'; exit 1")
    with pytest.raises(StoreError, match="ENOSPC") as caught:
        build([_trivial("one", "MARK")], TARGET, toolchain=full, store=store)
    assert str(store.root) in str(caught.value)
    assert store.ls() == []
    assert not list((store.root / "staging").iterdir())


def test_an_interrupt_keeps_what_is_built_and_leaves_nothing_running(
    tmp_path: Path, wrapped: Callable[[str], Toolchain]
) -> None:
    store, started = Store(tmp_path / "cache"), tmp_path / "started"
    kernels = [_trivial("one"), _trivial("two", "MARK")]
    slow = wrapped(f"echo $$ > {started}; sleep 600")

    def interrupt(done: int, total: int, name: str, seconds: float) -> None:
        deadline = time.monotonic() + 20
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        # One job: the first is published while the second compiles.
        build(kernels, TARGET, toolchain=slow, store=store, jobs=1, progress=interrupt)
    assert [entry.name for entry in store.ls()] == ["one"]
    assert not list((store.root / "staging").iterdir())
    compiler = Path(f"/proc/{started.read_text().strip()}")
    deadline = time.monotonic() + 10
    while compiler.exists():
        assert time.monotonic() < deadline, "the compiler still runs"
        time.sleep(0.05)
