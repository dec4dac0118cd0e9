from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.codegen import store as store_module
from attention_autotuner.codegen.artifact import Artifact, BuildTarget, artifact_digest
from attention_autotuner.codegen.entries import LIBRARY, LOG, RECORD, SOURCE, entry_name
from attention_autotuner.codegen.render import kernel_digest, render
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.codegen.store import Store, default_store
from attention_autotuner.codegen.toolchain import Toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.errors import StoreError
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.settings import Settings

NAME = "some_kernel"
DIGEST = "ab" * 32
REPORT = parse_ptxas(
    "ptxas info    : Compiling entry function 'kernel' for 'sm_80'\n"
    "ptxas info    : Used 40 registers, used 0 barriers, 360 bytes cmem[0]\n"
)
TOOLCHAIN = Toolchain(
    nvcc=Path("/opt/nvcc"),
    nvcc_version="13.0.88",
    cuda_root=Path("/opt"),
    cuda_flags=(),
    host_cxx=Path("/usr/bin/g++"),
    host_cxx_version="g++ 12.2.0",
    cutlass_include=Path("/opt/cutlass/include"),
    cutlass_version="4.2.0",
    cmake=Path("/usr/bin/cmake"),
    cmake_version="3.31.0",
    ninja=Path("/usr/bin/ninja"),
)
KERNEL = render(
    Candidate(
        dtype="fp16",
        padded_dim_qk=64,
        padded_dim_v=64,
        knobs=ForwardKnobs(
            block_m=64,
            block_n=64,
            warps_m=4,
            num_stages=2,
            k_slice=64,
        ),
    )
)
TARGET = BuildTarget(arch="80")


def _artifact(digest: str = DIGEST, name: str = NAME, **changes: Any) -> Artifact:
    artifact = Artifact(
        name=name,
        digest=digest,
        path=Path("unset"),
        report=REPORT,
        kernel_digest="cd" * 32,
        target=TARGET,
        toolchain=TOOLCHAIN.identity(),
        build_seconds=3.25,
        build_peak_bytes=400_000_000,
    )
    return replace(artifact, **changes)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "built.so"
    path.write_bytes(b"\x7fELF" + bytes(range(256)) * 8)
    return path


def _publish(store: Store, library: Path, artifact: Artifact | None = None) -> Artifact:
    return store.publish(
        source="source", library=library, log="log", artifact=artifact or _artifact()
    )


def _files(store: Store) -> set[str]:
    """Every file in the store, relative to its root."""
    return {p.relative_to(store.root).as_posix() for p in store.root.rglob("*") if p.is_file()}


def test_an_empty_store_has_nothing_and_creates_nothing(store: Store) -> None:
    assert store.lookup(NAME, DIGEST) is None
    assert store.get(KERNEL, TARGET, TOOLCHAIN) is None
    assert store.find(KERNEL.candidate, kernel_digest(KERNEL), TARGET) == []
    assert store.ls() == []
    assert store.verify() == []
    assert store.gc(max_bytes=0) == []
    assert not store.root.exists()


def test_what_is_published_comes_back_whole(store: Store, library: Path) -> None:
    published = _publish(store, library)
    folder = store.path(DIGEST, NAME)
    assert published == replace(_artifact(), path=folder / LIBRARY)
    assert Store(store.root).lookup(NAME, DIGEST) == published
    assert {path.name for path in folder.iterdir()} == {SOURCE, LIBRARY, RECORD, LOG}
    assert (folder / LIBRARY).read_bytes() == library.read_bytes()
    assert (folder / SOURCE).read_text() == "source"
    assert (folder / LOG).read_text() == "log"
    assert not list((store.root / "staging").iterdir())


def test_get_goes_by_the_artifact_digest(store: Store, library: Path) -> None:
    digest = artifact_digest(KERNEL, TARGET, TOOLCHAIN)
    published = _publish(store, library, _artifact(digest, KERNEL.name))
    assert store.get(KERNEL, TARGET, TOOLCHAIN) == published
    others = [
        (replace(KERNEL, text=KERNEL.text + "\n"), TARGET, TOOLCHAIN),
        (KERNEL, BuildTarget(arch="89"), TOOLCHAIN),
        (KERNEL, BuildTarget(arch="80", ptx=False), TOOLCHAIN),
        (KERNEL, TARGET, replace(TOOLCHAIN, nvcc_version="13.1.0")),
        (KERNEL, TARGET, replace(TOOLCHAIN, cutlass_version="4.3.0")),
        (KERNEL, TARGET, replace(TOOLCHAIN, host_cxx_version="g++ 13")),
    ]
    for kernel, target, toolchain in others:
        assert artifact_digest(kernel, target, toolchain) != digest
        assert store.get(kernel, target, toolchain) is None
    # Where the tools are installed does not matter.
    moved = replace(TOOLCHAIN, nvcc=Path("/elsewhere/nvcc"), cuda_root=Path("/elsewhere"))
    assert store.get(KERNEL, TARGET, moved) == published


def test_find_serves_what_another_compiler_made(store: Store, library: Path) -> None:
    identity = kernel_digest(KERNEL)
    old = _publish(store, library, _artifact("1" * 64, KERNEL.name, kernel_digest=identity))
    new = _publish(store, library, _artifact("2" * 64, KERNEL.name, kernel_digest=identity))
    _publish(store, library, _artifact("3" * 64, KERNEL.name, kernel_digest="ef" * 32))
    _publish(
        store,
        library,
        _artifact("4" * 64, KERNEL.name, kernel_digest=identity, target=BuildTarget(arch="90")),
    )
    os.utime(old.path.with_name(RECORD), (1, 1))
    assert store.find(KERNEL.candidate, kernel_digest(KERNEL), TARGET) == [new, old]


def test_long_names_fit_a_file_system(store: Store, library: Path) -> None:
    name = "n" * 400
    folder = entry_name(name, DIGEST)
    assert len(folder.encode()) < 200
    published = _publish(store, library, _artifact(name=name))
    assert published.path.parent.name == folder
    assert store.lookup(name, DIGEST) == published
    assert len(entry_name("é" * 200, DIGEST).encode()) < 200


def test_the_first_of_two_publishers_wins(store: Store, library: Path, tmp_path: Path) -> None:
    first = _publish(store, library)
    other = tmp_path / "other.so"
    other.write_bytes(b"built by somebody else")
    assert _publish(store, other) == first
    assert first.path.read_bytes() == library.read_bytes()


def test_many_publishers_at_once(store: Store, library: Path) -> None:
    start = threading.Barrier(8)
    results: list[Artifact] = []

    def publish() -> None:
        start.wait()
        results.append(_publish(store, library))

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert set(map(repr, results)) == {repr(store.lookup(NAME, DIGEST))}
    assert [entry.state for entry in store.ls()] == ["built"]


def _cut_library(folder: Path) -> None:
    (folder / LIBRARY).write_bytes((folder / LIBRARY).read_bytes()[:-1])


def _flip_byte(folder: Path) -> None:
    data = bytearray((folder / LIBRARY).read_bytes())
    data[100] ^= 1
    (folder / LIBRARY).write_bytes(data)


def _edit_record(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({**record, **changes}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no library": lambda folder: (folder / LIBRARY).unlink(),
    "short library": _cut_library,
    "other library": _flip_byte,
    "no record": lambda folder: (folder / RECORD).unlink(),
    "cut record": lambda folder: (folder / RECORD).write_text('{"schema": 1, "name"'),
    "no JSON object": lambda folder: (folder / RECORD).write_text("[]"),
    "not even text": lambda folder: (folder / RECORD).write_bytes(b"\xff\xfe\x00"),
    "other schema": lambda folder: _edit_record(folder, schema=999),
    "other artifact": lambda folder: _edit_record(folder, digest="0" * 64),
    "distorted report": lambda folder: _edit_record(folder, report={"kernels": 3}),
    "distorted target": lambda folder: _edit_record(folder, target={"arch": "zero", "ptx": True}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_repaired(
    store: Store, library: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    published = _publish(store, library)
    DAMAGES[damage](published.path.parent)
    with caplog.at_level(logging.WARNING):
        assert store.lookup(NAME, DIGEST) is None
    assert "damaged" in caplog.text
    assert str(published.path.parent) in caplog.text
    assert [entry.state for entry in store.ls()] == ["quarantined"]
    assert _publish(store, library) == published
    assert store.lookup(NAME, DIGEST) == published


def test_publishing_replaces_a_damaged_entry(store: Store, library: Path) -> None:
    published = _publish(store, library)
    _flip_byte(published.path.parent)
    assert _publish(store, library) == published
    assert sorted(entry.state for entry in store.ls()) == ["built", "quarantined"]


def test_verify_finds_every_damage(store: Store, library: Path) -> None:
    good = _publish(store, library)
    bad = _publish(store, library, _artifact("ef" * 32))
    moved = _publish(store, library, _artifact("12" * 32))
    _flip_byte(bad.path.parent)
    moved.path.parent.rename(moved.path.parent.with_name(f"{NAME}.{'9' * 16}"))
    damaged = {entry.path.name: reason for entry, reason in store.verify()}
    assert set(damaged) == {entry_name(NAME, "ef" * 32), f"{NAME}.{'9' * 16}"}
    assert "checksum" in damaged[entry_name(NAME, "ef" * 32)]
    assert store.verify() == []
    assert store.lookup(NAME, DIGEST) == good


def test_failures_are_remembered_until_a_success(store: Store, library: Path) -> None:
    for reason in ("first", "second"):
        failed = store.publish_failure(
            source="source",
            log="all of it",
            failure=BuildFailed(reason=reason),
            digest=DIGEST,
            name=NAME,
        )
        assert failed.reason == reason
    again = store.lookup(NAME, DIGEST)
    assert again == failed
    assert isinstance(again, BuildFailed)
    assert Path(again.log).read_text() == "all of it"
    published = _publish(store, library)
    assert store.lookup(NAME, DIGEST) == published
    assert [entry.state for entry in store.ls()] == ["built"]


def test_a_damaged_failure_is_forgotten(store: Store) -> None:
    store.publish_failure(
        source="s", log="l", failure=BuildFailed(reason="r"), digest=DIGEST, name=NAME
    )
    (store.failed_path(DIGEST, NAME) / RECORD).write_text("{")
    assert store.lookup(NAME, DIGEST) is None


@pytest.mark.parametrize("step", ["copy2", "sync_tree", "sync_folder"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_full_or_locked_disk_leaves_nothing_half_written(
    store: Store, library: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number), str(store.root / "the file"))

    with monkeypatch.context() as patch:
        patch.setattr(shutil if step == "copy2" else store_module, step, fail)
        with pytest.raises(StoreError) as caught:
            _publish(store, library)
    assert errno.errorcode[number] in str(caught.value)
    assert str(store.root / "the file") in str(caught.value)
    assert "ATTENTION_AUTOTUNER_CACHE_DIR" in str(caught.value)
    if step != "sync_folder":  # after the rename the entry is whole, if perhaps not durable yet
        assert _files(store) == set()
        assert store.lookup(NAME, DIGEST) is None
    assert _publish(store, library) == store.lookup(NAME, DIGEST)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_store import _files, _publish
from attention_autotuner.codegen.store import Store
from attention_autotuner.errors import StoreError
store = Store("/mnt/cache")
try:
    _publish(store, Path({library!r}))
except StoreError as error:
    assert {name!r} in str(error), error
    assert _files(store) == set(), _files(store)
    assert store.ls() == store.gc(max_bytes=0) == store.rm("*") == []
    print("refused cleanly")
"""


@pytest.mark.parametrize(("options", "name"), [("size=64k", "ENOSPC"), ("ro", "EROFS")])
def test_a_really_full_or_locked_disk(library: Path, options: str, name: str) -> None:
    """On a file system of its own, mounted in a private namespace."""
    library.write_bytes(bytes(1 << 20))
    path = [str(Path(__file__).parent), *sys.path]
    code = SCRIPT.format(path=path, library=str(library), name=name)
    mount = f'mount -t tmpfs -o {options} none /mnt && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    assert done.stdout == "refused cleanly\n", done.stderr


def test_a_file_where_the_folder_should_be(tmp_path: Path, library: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(StoreError, match=r"ENOTDIR|EEXIST"):
        _publish(Store(tmp_path / "cache"), library)
    assert (tmp_path / "cache").read_text() == "in the way"


def test_rm_by_pattern(store: Store, library: Path) -> None:
    for name, digest in (("left_a", "1" * 64), ("left_b", "2" * 64), ("right", "3" * 64)):
        _publish(store, library, _artifact(digest, name))
    store.publish_failure(
        source="", log="", failure=BuildFailed(reason="r"), digest="4" * 64, name="left_c"
    )
    assert [entry.name for entry in store.rm("left_*")] == ["left_a", "left_b", "left_c"]
    assert [entry.name for entry in store.ls()] == ["right"]
    assert store.rm("nothing*") == store.rm("ight") == []
    assert [entry.digest16 for entry in store.rm(f"right.{'3' * 16}")] == ["3" * 16]
    _publish(store, library, _artifact("5" * 64, "right"))
    assert [entry.name for entry in store.rm("ight", lambda name: name[1:])] == ["right"]
    assert _files(store) == set()


def test_gc_by_age_and_size(store: Store, library: Path) -> None:
    now = time.time()
    for number, age_days in enumerate((50, 30, 10, 1)):
        artifact = _publish(store, library, _artifact(f"{number}" * 64))
        os.utime(artifact.path.with_name(RECORD), (now - age_days * 86400,) * 2)
    assert store.gc() == []
    removed = store.gc(max_age_seconds=40 * 86400)
    assert [entry.digest16[0] for entry in removed] == ["0"]
    size = store.ls()[0].size_bytes
    assert size > library.stat().st_size
    removed = store.gc(max_bytes=2 * size + 100)
    assert [entry.digest16[0] for entry in removed] == ["1"]
    # A look-up is a use.
    assert store.lookup(NAME, "2" * 64) is not None
    removed = store.gc(max_bytes=size + 100)
    assert [entry.digest16[0] for entry in removed] == ["3"]
    assert len(store.gc(max_bytes=0)) == 1
    assert store.ls() == []


def test_gc_takes_quarantine_and_what_was_left_by_killed_processes(
    store: Store, library: Path
) -> None:
    _flip_byte(_publish(store, library).path.parent)
    store.verify()
    stale = ["staging/." + "1" * 32, "kernels/." + "2" * 32]
    fresh = ["staging/." + "3" * 32]
    for name in stale + fresh:
        (store.root / name).mkdir()
        (store.root / name / "file").write_text("x")
    for name in stale:
        os.utime(store.root / name, (1, 1))
    assert [entry.state for entry in store.gc()] == ["quarantined"]
    assert _files(store) == {f"{name}/file" for name in fresh}


def test_what_is_not_ours_stays(store: Store, library: Path) -> None:
    """Somebody may point the cache at a folder in use."""
    _publish(store, library)
    strangers = ["kernels/linux-6.1", "kernels/.git", "staging/site", "failed/exam", "work/.git"]
    for name in strangers:
        (store.root / name).mkdir(parents=True)
        (store.root / name / "file").write_text("precious")
        os.utime(store.root / name, (1, 1))
    assert len(store.ls()) == 1
    assert len(store.rm("*")) == 1
    assert store.gc(max_bytes=0, max_age_seconds=0) == []
    assert store.verify() == []
    assert _files(store) == {f"{name}/file" for name in strangers}


def test_ls_tells_sizes_and_states(store: Store, library: Path) -> None:
    artifact = _publish(store, library)
    store.publish_failure(
        source="abc", log="", failure=BuildFailed(reason="r"), digest="1" * 64, name="other"
    )
    built, failed = store.ls()
    assert (built.name, built.digest16, built.state) == (NAME, DIGEST[:16], "built")
    assert built.size_bytes == sum(p.stat().st_size for p in artifact.path.parent.iterdir())
    assert abs(built.last_used - time.time()) < 60
    assert (failed.name, failed.state) == ("other", "failed")


def test_default_store_is_the_configured_folder(tmp_path: Path) -> None:
    assert default_store(Settings(cache_dir=tmp_path)).root == tmp_path


def test_a_removed_store_is_an_empty_one(store: Store, library: Path) -> None:
    _publish(store, library)
    shutil.rmtree(store.root)
    assert store.lookup(NAME, DIGEST) is None
    assert store.ls() == []
