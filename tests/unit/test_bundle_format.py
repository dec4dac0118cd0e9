"""Bundles: what is written, what is read back, and which kernel of one serves."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.arch import A100
from attention_autotuner.codegen.artifact import BuildTarget
from attention_autotuner.codegen.bundle import INDEX, Bundle, BundledPick, open_bundle, write_bundle
from attention_autotuner.codegen.kernel_wheel import platform_tag, write_wheel
from attention_autotuner.codegen.render import abi_version
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.tree import present_tree
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import BundleError
from attention_autotuner.tuning.bundled import bundled_pick
from attention_autotuner.version import __version__
from tests.fake_bundles import make_bundle, publish

POLICY = A100()
PROBLEM = Problem(dim_qk=64, dim_v=64)
DEFAULT = POLICY.default(PROBLEM)
OTHER = next(c for c in POLICY.legal(PROBLEM) if c != DEFAULT)
PICKS = [
    BundledPick(
        problem=PROBLEM,
        candidate=OTHER,
        layer="shipped",
        gpu_name="NVIDIA A100",
        median_us=12.5,
        estimate_us=11.0,
    ),
    BundledPick(problem=PROBLEM, candidate=DEFAULT, layer="default"),
]


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path, PICKS)


def test_the_index_holds_what_other_readers_rely_on(bundle: Bundle) -> None:
    index = json.loads((bundle.root / INDEX).read_text())
    head = {name: index[name] for name in index if name not in ("created", "kernels", "picks")}
    assert head == {
        "schema": 1,
        "abi_version": abi_version(),
        "package_version": __version__,
        "arch": "A100",
        "build_arch": "80",
        "environment": None,
        "tree": present_tree(),
    }
    first, second = index["kernels"]
    assert first["candidate"] == OTHER.config
    assert second["name"] == DEFAULT.name
    library = bundle.root / first["library"]
    assert library.read_bytes() == b"no library"
    assert library.stat().st_size == first["library_bytes"]
    assert sorted(path.name for path in library.parent.iterdir()) == [
        "build.json",
        "build.log",
        "kernel.cu",
        "kernel.so",
    ]
    assert set(first) == {
        "name", "library", "library_sha256", "library_bytes", "digest", "kernel_digest", "target",
        "source_digest", "toolchain", "candidate",
    }  # fmt: skip
    assert index["picks"][0] == {
        # As before there were later fields: older readers take no other names.
        "problem": values_of(PROBLEM),
        "kernel": 0,
        "layer": "shipped",
        "gpu_name": "NVIDIA A100",
        "median_us": 12.5,
        "estimate_us": 11.0,
        "proof": None,
    }


def test_what_is_written_is_read_back_and_is_a_store(bundle: Bundle) -> None:
    assert list(open_bundle(bundle.root).picks) == PICKS
    (kernel,) = (
        candidate_here for candidate_here in bundle.kernels if candidate_here.candidate == OTHER
    )
    artifact = bundle.read(kernel)
    assert artifact is not None
    assert Store(bundle.root).lookup(artifact.name, artifact.digest) == artifact
    assert bundle.by_source[artifact.kernel_digest] == (kernel,)


def test_an_existing_folder_is_kept_unless_it_is_a_bundle_that_may_be_replaced(
    bundle: Bundle, tmp_path: Path
) -> None:
    store = Store(tmp_path / "workshop")
    artifacts = {DEFAULT: publish(store, DEFAULT)}
    write = {"arch": "A100", "build_arch": "80", "artifacts": artifacts, "picks": PICKS[1:]}
    with pytest.raises(BundleError, match="--force"):
        write_bundle(bundle.root, **write)  # type: ignore[arg-type]
    assert len(open_bundle(bundle.root).picks) == 2
    assert len(write_bundle(bundle.root, force=True, **write).picks) == 1  # type: ignore[arg-type]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(BundleError, match="is no bundle"):
        write_bundle(tmp_path / "mine", force=True, **write)  # type: ignore[arg-type]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"


def test_a_bundle_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "workshop")
    artifacts = {
        candidate_here: publish(store, candidate_here) for candidate_here in (OTHER, DEFAULT)
    }
    (artifacts[DEFAULT].path.parent / "build.log").unlink()
    place = tmp_path / "place"
    with pytest.raises(FileNotFoundError, match=r"build\.log"):
        write_bundle(
            place / "bundle", arch="A100", build_arch="80", artifacts=artifacts, picks=PICKS
        )
    assert list(place.iterdir()) == []


def test_a_bundle_that_cannot_be_replaced_stays(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = {DEFAULT: publish(Store(tmp_path / "workshop"), DEFAULT)}
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target == bundle.root and not path.name.endswith(".old"):
            raise OSError(errno.EIO, "no", str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="no"):
        write_bundle(
            bundle.root,
            arch="A100",
            build_arch="80",
            artifacts=artifacts,
            picks=PICKS[1:],
            force=True,
        )
    assert list(open_bundle(bundle.root).picks) == PICKS
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_to_a_bundle_stays_a_link(bundle: Bundle, tmp_path: Path) -> None:
    artifacts = {DEFAULT: publish(Store(tmp_path / "workshop"), DEFAULT)}
    link = tmp_path / "current"
    link.symlink_to(bundle.root)
    before = sorted(tmp_path.iterdir())
    write_bundle(
        link, arch="A100", build_arch="80", artifacts=artifacts, picks=PICKS[1:], force=True
    )
    assert link.is_symlink()
    assert list(open_bundle(bundle.root).picks) == PICKS[1:]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("number", [-1, 2, True, "0"])
def test_a_pick_of_no_kernel_is_refused(bundle: Bundle, number: object) -> None:
    index = json.loads((bundle.root / INDEX).read_text())
    index["picks"][0]["kernel"] = number
    (bundle.root / INDEX).write_text(json.dumps(index))
    with pytest.raises(BundleError, match=r"kernel must be in 0\.\.1"):
        open_bundle(bundle.root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 7}, "must have schema 1, it has 7"),
        ({"abi_version": 9001}, "speak ABI 9001"),
        ({"kernels": [{}]}, "lacks or distorts a field"),
        ({"picks": [{"layer": "rumour"}]}, "rumour"),
        ({"kernels": [{"library": "../../lib/kernel.so"}]}, "outside the bundle"),
    ],
)
def test_an_index_that_cannot_be_trusted_is_refused(
    bundle: Bundle, change: dict[str, object], message: str
) -> None:
    index = json.loads((bundle.root / INDEX).read_text())
    (bundle.root / INDEX).write_text(json.dumps(index | change))
    with pytest.raises(BundleError, match=message):
        open_bundle(bundle.root)
    (bundle.root / INDEX).write_text("{")
    with pytest.raises(BundleError, match="not JSON"):
        open_bundle(bundle.root)
    (bundle.root / INDEX).unlink()
    with pytest.raises(BundleError, match="is no bundle"):
        open_bundle(bundle.root)


def test_a_damaged_library_is_not_served(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    kernel = bundle.kernels[0]
    (kernel.folder / "kernel.so").write_bytes(b"no librarY")
    assert bundle.read(kernel) is None
    assert "does not match its checksum" in caplog.text
    shutil.rmtree(kernel.folder)
    assert bundle.read(kernel) is None


def pick(layer: str, **changes: object) -> BundledPick:
    return BundledPick(problem=replace(PROBLEM, **changes), candidate=DEFAULT, layer=layer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("picks", "problem", "chosen"),
    [
        # the very bucket before a nearer line of the index
        ([pick("shipped", batch=8), pick("shipped")], PROBLEM, 1),
        # a length within the bucket: of the user's own pick any, of a shipped one the same multiple of 16
        ([pick("record")], replace(PROBLEM, seqlen_q=4000, seqlen_k=4000), 0),
        ([pick("shipped")], replace(PROBLEM, seqlen_q=4000, seqlen_k=4000), None),
        ([pick("shipped")], replace(PROBLEM, seqlen_q=4090, seqlen_k=4090), 0),
        # the layer before the distance
        ([pick("shipped"), pick("record", batch=8)], PROBLEM, 1),
        # the nearest of a layer, the first of equals
        (
            [pick("predicted", batch=32), pick("predicted", batch=8), pick("predicted", batch=2)],
            PROBLEM,
            1,
        ),
        # too far, so the default, however far that is
        (
            [pick("shipped", batch=128), pick("default", batch=512)],
            replace(PROBLEM, batch=1),
            1,
        ),
        ([pick("shipped", batch=128)], replace(PROBLEM, batch=1), None),
        ([pick("default")], replace(PROBLEM, causal=True), None),
        ([pick("default")], replace(PROBLEM, dim_qk=80), None),
        ([pick("default")], replace(PROBLEM, dim_qk=56, dim_v=56), 0),
    ],
)
def test_which_pick_serves(
    bundle: Bundle, picks: list[BundledPick], problem: Problem, chosen: int | None
) -> None:
    result = bundled_pick(replace(bundle, picks=tuple(picks)), problem)
    assert result is (None if chosen is None else picks[chosen])


def test_the_platform_tag_is_what_the_symbols_need(tmp_path: Path) -> None:
    old, new, newer_cxx = (tmp_path / name for name in ("old.so", "new.so", "cxx.so"))
    old.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.14\0GLIBCXX_3.4\0CXXABI_1.3\0")
    new.write_bytes(b"\0GLIBC_2.34\0GLIBC_2.4\0GLIBCXX_3.4.11\0")
    newer_cxx.write_bytes(b"\0GLIBC_2.34\0GLIBCXX_3.4.30\0")
    assert platform_tag([old]).startswith("manylinux_2_17_")
    assert platform_tag([old, new]).startswith("manylinux_2_34_")
    assert platform_tag([old, newer_cxx]).startswith("linux_")


def test_a_wheel_of_kernels_installs_and_is_found_by_its_name(
    tmp_path: Path, bundle: Bundle
) -> None:
    wheel = write_wheel(bundle, "A100", tmp_path / "dist")
    assert wheel == write_wheel(bundle, "A100", tmp_path / "dist")  # over itself, whole
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [wheel.name]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        record = archive.read(next(n for n in archive.namelist() if n.endswith("/RECORD")))
        assert len(record.splitlines()) == len(archive.namelist())
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--target", str(site), str(wheel)], check=True)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from attention_autotuner.codegen.installed import bundles\n"
        "from attention_autotuner.settings import current\n"
        "(found,) = bundles(current())\n"
        "print(found.root)\n"
        "assert all(found.read(kernel) is not None for kernel in found.kernels)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(site)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(site / "attention_autotuner_kernels_a100")


def test_a_wheel_of_nothing_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no kernels"):
        write_wheel(replace(bundle, kernels=()), "A100", tmp_path)


def test_targets_that_a_device_runs() -> None:
    from attention_autotuner.codegen.installed import runs_on

    def runs(built: str, device: str, ptx: bool = True) -> bool:
        return runs_on(BuildTarget(arch=built, ptx=ptx), BuildTarget(arch=device))

    assert runs("80", "80")
    assert runs("80", "86")
    assert runs("80", "90")
    assert runs("90a", "90a")
    assert not runs("90", "80")
    assert not runs("80", "90", ptx=False)
    assert runs("80", "89", ptx=False)
    assert not runs("90a", "90")
