"""Tampering with a cache or a bundle: nothing foreign runs, and each case has its typed outcome."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import measured_specs
from attention_autotuner.cli import doctor
from attention_autotuner.cli.bringing_up import read_properties
from attention_autotuner.codegen import installed
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.bundle import Bundle, BundledPick, open_bundle
from attention_autotuner.codegen.entries import LIBRARY, RECORD
from attention_autotuner.codegen.store import Store
from attention_autotuner.core import trust
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import (
    ArchSpecError,
    ArtifactError,
    AttentionAutotunerError,
    BundleError,
    RecordError,
    StoreError,
    UnsupportedProblemError,
    UntrustedError,
)
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.serving.loader import load
from attention_autotuner.serving.untuned import read_problems
from attention_autotuner.tuning import peaks
from attention_autotuner.tuning.shipped import read_shipped
from tests.fake_bundles import make_bundle, publish

STRANGER = 54321  # no user and no group of any machine
DEEP = "[" * 100_000 + "]" * 100_000
CANDIDATE = Candidate(
    dtype="fp16",
    padded_dim_qk=64,
    padded_dim_v=64,
    knobs=ForwardKnobs(block_m=64, block_n=64, warps_m=4, num_stages=2, k_slice=64),
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
SIGN = "AUTOTUNER_TEST_SIGN"  # where a foreign library leaves a sign that it ran

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library that runs code as soon as it is loaded."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign.c").write_text(
        "#include <fcntl.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void run(void) {\n"
        f'  char const *sign = getenv("{SIGN}");\n  if (sign) creat(sign, 0600);\n}}\n'
    )
    command = ["gcc", "-shared", "-fPIC", "foreign.c", "-o", "foreign.so"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "foreign.so").read_bytes()


@pytest.fixture
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a foreign library makes when it is loaded."""
    monkeypatch.setenv(SIGN, str(tmp_path / "sign"))
    return tmp_path / "sign"


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return publish(Store(tmp_path / "cache"), CANDIDATE)


def replace_library(folder: Path, foreign: bytes, *, checksum: bool = True) -> None:
    """Put another library into an entry, and its checksum into the record."""
    (folder / LIBRARY).write_bytes(foreign)
    record = json.loads((folder / RECORD).read_text())
    if checksum:
        copy = folder.parent / "copy"
        copy.write_bytes(foreign)
        record["library_sha256"], record["library_bytes"] = trust.file_sha256(copy), len(foreign)
        copy.unlink()
    (folder / RECORD).write_text(json.dumps(record))


def use(artifact: Artifact) -> str:
    """The outcome of asking for a kernel in the store: the error, a miss, or that it was loaded."""
    try:
        stored = Store(artifact.path.parents[2]).lookup(artifact.name, artifact.digest)
    except UntrustedError as error:
        return str(error)
    if stored is None:
        return "miss"
    assert isinstance(stored, Artifact)
    with pytest.raises(ArtifactError, match="no kernel library"):
        load(stored)
    return "loaded"


def move_away(folder: Path, mode: int) -> Path:
    """Move an entry elsewhere, into a folder of a mode, and leave a link in its place."""
    elsewhere = folder.parents[2] / "elsewhere"
    elsewhere.mkdir()
    moved = folder.rename(elsewhere / folder.name)
    folder.symlink_to(moved)
    elsewhere.chmod(mode)
    return moved


def link_library(folder: Path) -> None:
    elsewhere = folder.parents[2] / "elsewhere"
    elsewhere.mkdir()
    (folder / LIBRARY).rename(elsewhere / "foreign.so")
    (folder / LIBRARY).symlink_to(elsewhere / "foreign.so")
    elsewhere.chmod(0o777)


def into_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def give(path: Path, *, group: bool = False) -> None:
    """Make somebody else the owner of a path, or their group its group, which may write to it."""
    os.chown(path, *((-1, STRANGER) if group else (STRANGER, -1)), follow_symlinks=False)
    if group:
        path.chmod(0o775)


# What is done to an entry whose library was replaced, together with its checksum, by one that runs code.
UNTRUSTED: dict[str, Change] = {
    "library for all": lambda folder: (folder / LIBRARY).chmod(0o666),
    "record for all": lambda folder: (folder / RECORD).chmod(0o646),
    "entry for all": lambda folder: folder.chmod(0o777),
    "kernels for all": lambda folder: folder.parent.chmod(0o777),
    "cache for all": lambda folder: folder.parents[1].chmod(0o757),
    "linked entry for all": lambda folder: move_away(folder, 0o755).chmod(0o777),
    "linked entry in a folder for all": lambda folder: move_away(folder, 0o777),
    "linked library in a folder for all": link_library,
}
STRANGE: dict[str, Change] = {
    "library": lambda folder: give(folder / LIBRARY),
    "record": lambda folder: give(folder / RECORD),
    "entry": give,
    "kernels": lambda folder: give(folder.parent),
    "cache": lambda folder: give(folder.parents[1]),
    "linked entry": lambda folder: give(move_away(folder, 0o755)),
    "library of a group": lambda folder: give(folder / LIBRARY, group=True),
    "cache of a group": lambda folder: give(folder.parents[1], group=True),
}
UNTRUSTED_CASES = [
    *((change) for change in UNTRUSTED.values()),
    *(pytest.param(change, marks=needs_root) for change in STRANGE.values()),
]
CASE_NAMES = [*UNTRUSTED, *(f"strange {name}" for name in STRANGE)]


@pytest.mark.parametrize("change", UNTRUSTED_CASES, ids=CASE_NAMES)
def test_what_others_own_or_can_change_does_not_run(
    artifact: Artifact, foreign: bytes, sign: Path, change: Change
) -> None:
    folder = artifact.path.parent
    replace_library(folder, foreign)
    change(folder)
    said = use(artifact)
    assert "is not used: it belongs to " in said
    assert "has mode 0" in said
    assert "chmod -R go-w" in said or f"ATTENTION_AUTOTUNER_TRUST_OWNERS={STRANGER}" in said
    assert not sign.exists()
    # Nor does it run for who names the file.
    if change in (UNTRUSTED["library for all"], UNTRUSTED["entry for all"]):
        with pytest.raises(UntrustedError):
            load(artifact.path)
    assert not sign.exists()


def test_the_sign_is_seen_where_a_library_does_run(
    artifact: Artifact, foreign: bytes, sign: Path
) -> None:
    replace_library(artifact.path.parent, foreign)
    assert use(artifact) == "loaded"
    assert sign.exists()


DAMAGED: dict[str, Change] = {
    "record nested deeply": lambda folder: (folder / RECORD).write_text(DEEP),
    "record a fifo": lambda folder: into_fifo(folder / RECORD),
    "record a folder": lambda folder: into_folder(folder / RECORD),
    "library a fifo": lambda folder: into_fifo(folder / LIBRARY),
    "library a folder": lambda folder: into_folder(folder / LIBRARY),
    "another checksum": lambda folder: (folder / RECORD).write_text(
        (folder / RECORD).read_text().replace('"library_sha256": "', '"library_sha256": "0')
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_does_not_run(
    artifact: Artifact, foreign: bytes, sign: Path, change: Change
) -> None:
    replace_library(artifact.path.parent, foreign)
    change(artifact.path.parent)
    assert use(artifact) == "miss"
    assert not sign.exists()
    assert not artifact.path.parent.exists()  # set aside, to be built again


def test_a_library_without_its_checksum_does_not_run(
    artifact: Artifact, foreign: bytes, sign: Path
) -> None:
    replace_library(artifact.path.parent, foreign, checksum=False)
    assert use(artifact) == "miss"
    assert not sign.exists()


@needs_root
def test_trusted_owners_are_named_by_a_setting(artifact: Artifact, foreign: bytes) -> None:
    folder = artifact.path.parent
    replace_library(folder, foreign)
    for path in (folder.parents[1], folder.parent, folder, *folder.iterdir()):
        give(path)
    assert "another user" in use(artifact)
    with settings.override(trust_owners=(1, STRANGER)):
        assert use(artifact) == "loaded"
        folder.chmod(0o777)
        assert "others can write to it" in use(artifact)


def test_sticky_folders_and_private_groups_pass(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifact.path.parent
    folder.parents[1].chmod(0o1777)
    owner = folder.stat().st_uid
    members: list[str] = []
    user = SimpleNamespace(pw_name="ada", pw_gid=folder.stat().st_gid)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {owner: user}[uid])
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name="ada", gr_mem=members))
    folder.chmod(0o775)
    trust.check_entry(folder, LIBRARY, RECORD)
    members.append("ada")
    trust.check_entry(folder)
    members.append("bob")
    with pytest.raises(UntrustedError, match="belongs to ada and has mode 0775"):
        trust.check_entry(folder)


def test_nothing_is_built_where_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(UntrustedError), Store(tmp_path / "cache").staging():
        pass
    with settings.override(cache_dir=tmp_path / "cache"):
        finding = next(check for check in doctor.CHECKS if check.__name__ == "check_cache")()
    assert finding.state == "broken"
    assert "others can write to it" in finding.fix


def test_a_store_of_whatever_umask_is_writable_by_its_owner_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "cache")
    before = os.umask(0)
    try:
        with store.staging():
            pass
        artifact = publish(store, CANDIDATE)
    finally:
        os.umask(before)
    assert store.lookup(artifact.name, artifact.digest) == artifact


def test_verify_sets_untrusted_entries_aside(artifact: Artifact) -> None:
    store = Store(artifact.path.parents[2])
    artifact.path.chmod(0o666)
    ((entry, reason),) = store.verify()
    assert (entry.path, "mode 0666" in reason) == (artifact.path.parent, True)
    store.root.chmod(0o777)
    with pytest.raises(UntrustedError):
        store.verify()


def test_a_damaged_entry_of_a_read_only_cache_is_passed_over(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    artifact.path.write_bytes(b"damaged")

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with caplog.at_level(logging.WARNING):
        assert use(artifact) == "miss"
    assert "is 7 bytes, not" in caplog.text
    assert artifact.path.exists()
    with pytest.raises(StoreError, match="EROFS"):
        publish(Store(artifact.path.parents[2]), CANDIDATE)


def test_a_linked_entry_is_removed_and_what_it_leads_to_stays(artifact: Artifact) -> None:
    folder = artifact.path.parent
    moved = move_away(folder, 0o755)
    assert [entry.path for entry in Store(folder.parents[1]).rm("*")] == [folder]
    assert not folder.is_symlink()
    assert (moved / LIBRARY).exists()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    problem = Problem(seqlen_q=512, seqlen_k=512, dim_qk=64, dim_v=64)
    return make_bundle(
        tmp_path, [BundledPick(problem=problem, candidate=CANDIDATE, layer="default")]
    )


def entry_of(bundle: Bundle) -> Path:
    return bundle.kernels[0].folder


@pytest.mark.parametrize("place", [".", "index.json", "kernels", "entry", f"entry/{LIBRARY}"])
@pytest.mark.parametrize("to_all", [True, pytest.param(False, marks=needs_root)])
def test_a_bundle_that_others_own_or_can_change_is_refused(
    bundle: Bundle, place: str, to_all: bool
) -> None:
    path = bundle.root / place.replace("entry", str(entry_of(bundle).relative_to(bundle.root)))
    if to_all:
        path.chmod(path.stat().st_mode | 0o002)
    else:
        give(path)
    with pytest.raises(BundleError, match=f"{path} is not used"):
        open_bundle(bundle.root).read(bundle.kernels[0])


def test_an_installed_bundle_that_others_can_change_is_left_out(
    bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    bundle.root.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert installed._open_installed(bundle.root) is None
    assert "others can write to it" in caplog.text


def test_a_bundle_whose_library_and_record_were_replaced_together(
    bundle: Bundle, foreign: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert bundle.read(bundle.kernels[0]) is not None
    replace_library(entry_of(bundle), foreign)
    with caplog.at_level(logging.WARNING):
        assert open_bundle(bundle.root).read(bundle.kernels[0]) is None
    assert "does not match its checksum" in caplog.text


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A sealed folder with files, a folder and links, as the links to a toolchain are."""
    folder = tmp_path / "cache" / "kind" / "sealed"
    (folder / "include").mkdir(parents=True)
    (folder / "CMakeSystem.cmake").write_text("set(A 1)\n")
    (folder / "include" / "header.h").write_text("// header\n")
    (folder / "nvcc").symlink_to(tmp_path / "nvcc")
    (folder / "lib").symlink_to(tmp_path)
    trust.seal(folder)
    return folder


def retarget(path: Path) -> None:
    path.unlink()
    path.symlink_to("/bin/true")


TAMPERED: dict[str, Change] = {
    "line added": lambda folder: (folder / "CMakeSystem.cmake").open("a").write("execute_process()"),
    "file gone": lambda folder: (folder / "CMakeSystem.cmake").unlink(),
    "file added": lambda folder: (folder / "include" / "other.h").touch(),
    "link retargeted": lambda folder: retarget(folder / "nvcc"),
    "folder link retargeted": lambda folder: retarget(folder / "lib"),
    "file by link": lambda folder: retarget(folder / "CMakeSystem.cmake"),
    "file by fifo": lambda folder: into_fifo(folder / "CMakeSystem.cmake"),
    "seal gone": lambda folder: (folder / trust.SEAL).unlink(),
    "seal nested deeply": lambda folder: (folder / trust.SEAL).write_text(DEEP),
    "seal by fifo": lambda folder: into_fifo(folder / trust.SEAL),
    "seal no text": lambda folder: (folder / trust.SEAL).write_bytes(b"\xff"),
}  # fmt: skip


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_a_sealed_folder_that_was_changed_is_not_whole(sealed: Path, change: Change) -> None:
    assert trust.is_whole(sealed)
    change(sealed)
    assert not trust.is_whole(sealed)


@pytest.mark.parametrize("place", ["../..", "..", ".", "include", "include/header.h", trust.SEAL])
def test_a_sealed_folder_that_others_can_change_is_refused(sealed: Path, place: str) -> None:
    (sealed / place).chmod(0o777)
    with pytest.raises(UntrustedError, match="mode 0777"):
        trust.is_whole(sealed)


def test_the_library_of_peaks_is_built_again_where_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = []

    def compile_it(source: Path, library: Path, *rest: Any) -> None:
        built.append(library)
        library.write_bytes(b"peaks")

    monkeypatch.setattr(peaks, "_compile", compile_it)
    toolchain: Any = SimpleNamespace(identity=dict)
    store = Store(tmp_path / "cache")
    library = peaks.build_library(BuildTarget(arch="80"), toolchain=toolchain, store=store)
    assert peaks.build_library(BuildTarget(arch="80"), toolchain=toolchain, store=store) == library
    assert len(built) == 1
    library.write_bytes(b"other")
    with caplog.at_level(logging.WARNING):
        again = peaks.build_library(BuildTarget(arch="80"), toolchain=toolchain, store=store)
    assert (again, again.read_bytes(), len(built)) == (library, b"peaks", 2)
    assert "is not what was built there" in caplog.text
    library.chmod(0o666)
    with pytest.raises(UntrustedError):
        peaks.build_library(BuildTarget(arch="80"), toolchain=toolchain, store=store)


READERS: dict[str, tuple[Callable[[Path], object], type[AttentionAutotunerError]]] = {
    "index": (lambda path: open_bundle(path.parent), BundleError),
    "spec": (measured_specs.read, ArchSpecError),
    "properties": (read_properties, ArchSpecError),
    "problems": (read_problems, UnsupportedProblemError),
    "shipped": (read_shipped, RecordError),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("text", [DEEP, '{"a": ' * 100_000 + "1" + "}" * 100_000])
def test_json_nested_deeply_is_a_typed_error(
    tmp_path: Path,
    reader: tuple[Callable[[Path], object], type[AttentionAutotunerError]],
    text: str,
) -> None:
    read, error = reader
    path = tmp_path / "index.json"
    path.write_text(text)
    with pytest.raises(error, match="nested too deeply"):
        read(path)


@pytest.fixture(autouse=True)
def _closed(tmp_path: Path) -> Iterator[None]:
    """Give back what a test gave away, so that its folder can be removed."""
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)
