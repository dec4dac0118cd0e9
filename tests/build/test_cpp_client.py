"""The C++ client: its reader of JSON, its picks, its errors, and a program that finds it installed."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import arch
from attention_autotuner.arch import H100
from attention_autotuner.codegen.bundle import LAYERS, open_bundle
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core import abi
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import FORMS, OPERANDS, Problem
from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.tuning.bundled import bundled_pick
from attention_autotuner.tuning.lookup import MAX_DISTANCE, distance
from attention_autotuner.version import __version__
from tests.cpp_programs import (
    ROOT,
    SMALL,
    Fake,
    ask,
    checks_of,
    cmake,
    compile_library,
    index_of,
    kernel_of,
    load,
    pick_of,
    run,
    write_fake_bundle,
)

pytestmark = pytest.mark.build

Probe = Callable[[str, Sequence[str]], list[str]]


@pytest.fixture(scope="module")
def probe(cpp_programs: Path) -> Probe:
    """Asks the test program of the client for one answer a text."""

    def answers(command: str, texts: Sequence[str]) -> list[str]:
        lines = "".join(f"{command} {text}\n" for text in texts)
        done = ask(cpp_programs / "probe", stdin=lines)
        assert done.returncode == 0, done.stderr
        document = done.stdout.splitlines()
        assert len(document) == len(texts)
        return document

    return answers


@pytest.fixture(scope="module")
def pick(cpp_programs: Path) -> Path:
    """The command that says what a bundle serves."""
    return cpp_programs / "client" / "attention_autotuner_pick"


GEMM: dict[str, Any] = {"op": "gemm", "batch": 1, "heads_q": 1, "heads_kv": 1}


def shown(value: Any) -> str:
    """A JSON value as the probe prints it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return f"{value:.17g}"
    if isinstance(value, str):
        return f'"{value.encode().hex()}"'
    if isinstance(value, list):
        return "[" + "".join(shown(item) + "," for item in value) + "]"
    return "{" + "".join(f"{name}:{shown(item)}," for name, item in value.items()) + "}"


VALID = [
    "null", "true", " false ", "0", "-0.0", "12", "-1.5", "1e3", "1E-3", "2.5e+10", "123456789012345678",
    '""', '"a b"', r'"\"\\\/\b\f\n\r\t"', r'"\u00e9\u20AC\ud83d\ude00\u0000"', '"é€😀"',
    "[]", "[ ]", "[1, [2], {}]", '{"a": {"b": [null]}, "c": ""}', '{"": 1}', "[" * 60 + "]" * 60,
    "3.141592653589793", "5e-324", "1.7976931348623157e308", "0.1",
]  # fmt: skip
MALFORMED = [
    "", " ", "nul", "True", "tru e", "01", "-", "1.", ".5", "+1", "1e", "1e+", "0x1", "NaN", "Infinity", "1e999",
    '"', '"a', r'"\x"', r'"\u12"', r'"\ud800"', r'"\udc00"', r'"\ud800\u0041"', '"\t"', "'a'",
    "[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,}', "{a:1}", '{1:1}',
    '{"a":1,"a":2}', "1 2", "[]]", "{}x", "[" * 80 + "]" * 80,
]  # fmt: skip


def test_json_is_read_as_python_reads_it(probe: Probe) -> None:
    assert probe("json", VALID) == [shown(json.loads(text)) for text in VALID]


def test_malformed_json_is_refused_with_its_place(probe: Probe) -> None:
    for text, answer in zip(MALFORMED, probe("json", MALFORMED), strict=True):
        assert answer.startswith("error: byte "), f"{text!r} was read as {answer}"


@pytest.mark.parametrize(
    "bad",
    [b"\xff", b"\xc0\xaf", b"\xe2\x82", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe0\x80\x80"],
)  # fmt: skip
def test_what_is_no_utf8_is_refused(pick: Path, tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "index.json").write_bytes(b'{"schema": "' + bad + b'"}')
    done = ask(pick, "--bundle", tmp_path)
    assert done.returncode == 1
    assert "invalid UTF-8" in done.stderr


def random_problem(source: random.Random, **fixed: Any) -> Problem:
    """Any problem that kernels solve."""
    while True:
        kinds = ("attention", "attention", "retnet", "retention", "gemm")
        op = fixed.get("op") or source.choice(kinds)
        direction = source.choice(("forward", "backward"))
        heads_kv = source.choice((1, 2, 3, 8))
        seqlen = source.choice((1, 16, 17, 100, 128, 1000, 1024, 4097, 16384))
        fields: dict[str, Any] = {
            "op": op,
            "direction": direction,
            "dtype": source.choice(("fp16", "bf16")),
            "batch": source.choice((1, 2, 3, 8)),
            "heads_kv": heads_kv,
            "heads_q": heads_kv * source.choice((1, 2, 4)),
            "seqlen_q": seqlen,
            "seqlen_k": seqlen if op == "retention" else source.choice((1, 64, 100, 2048, seqlen)),
            "dim_qk": source.choice((64, 72, 128, 192)),
            "dim_v": source.choice((64, 128)),
            "causal": source.random() < 0.6,
            "causal_alignment": source.choice(("bottom_right", "top_left")),
            "alignment_bytes": source.choice((16, 16, 2)),
            "deterministic": source.random() < 0.3,
            "mask": source.choice(("explicit", "decay")) if op == "retnet" else "none",
            "form": source.choice(FORMS) if op == "retention" else "auto",
            "key_bounds": (op, direction) == ("attention", "forward") and source.random() < 0.4,
        }
        if op == "gemm":
            fields |= {"batch": 1, "heads_q": 1, "heads_kv": 1, "seqlen_k": seqlen, "causal": False}
            fields |= {"dim_qk": source.choice((64, 4096, 8200)), "direction": "forward"}
            fields |= {"operands": source.choice(OPERANDS), "alignment_bytes": 16}
        try:
            return Problem(**(fields | fixed))
        except UnsupportedProblemError:
            continue


def test_problems_are_bucketed_and_counted_as_in_python(probe: Probe) -> None:
    source = random.Random(5)
    problems = [random_problem(source) for _ in range(400)]
    problems += [Problem(seqlen_q=n, seqlen_k=2**30 - n) for n in (1, 15, 16, 2**20 + 1, 2**29)]
    for problem, answer in zip(
        problems, probe("bucket", [json.dumps(values_of(p)) for p in problems]), strict=True
    ):
        lengths = (problem.bucketed(), problem.rounded())
        numbers = [length for p in lengths for length in (p.seqlen_q, p.seqlen_k)]
        numbers += [problem.padded_dim_qk, problem.padded_dim_v]
        document = answer.split(" ", 9)
        assert [int(text) for text in document[:7]] == [*numbers, problem.causal_offset]
        assert float(document[7]) == pytest.approx(problem.flops, rel=1e-12)
        assert float(document[8]) == pytest.approx(problem.bytes_moved, rel=1e-12)
        assert document[9] == problem.describe()


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "conv"}, {"direction": "sideways"}, {"dtype": "fp32"}, {"batch": 0}, {"heads_kv": -1},
        {"seqlen_q": 0}, {"seqlen_k": 2**30 + 1}, {"heads_q": 6, "heads_kv": 4}, {"dim_qk": 12}, {"dim_qk": 264},
        {"dim_v": 520}, {"dim_v": 63}, {"causal_alignment": "middle"}, {"alignment_bytes": 8},
        {"deterministic": True}, {"mask": "decay"}, {"op": "retnet"}, {"form": "recurrent"},
        {"op": "retention"}, {"op": "retention", "causal": True, "seqlen_k": 64},
        {"op": "retention", "causal": True, "batch": 65536},
        {"op": "retnet", "mask": "explicit", "causal_alignment": "top_left"},
        {"op": "retnet", "mask": "decay"},
        {"key_bounds": True, "direction": "backward"},
        {"key_bounds": True, "op": "retnet", "mask": "explicit"},
        {"operands": "nt"}, {"operands": "xy"}, GEMM | {"batch": 2}, GEMM | {"direction": "backward"},
        GEMM | {"seqlen_k": 64}, GEMM | {"causal": True}, GEMM | {"alignment_bytes": 2},
        GEMM | {"seqlen_q": 12, "seqlen_k": 12, "operands": "tn"}, GEMM | {"dim_v": 2**30 + 8},
    ],
)  # fmt: skip
def test_problems_that_python_refuses_are_refused(probe: Probe, fields: dict[str, Any]) -> None:
    def gist(message: str) -> tuple[str, str]:
        plain = message.translate(str.maketrans("", "", "'\"")).lower()
        return plain.split(maxsplit=1)[0], plain.rpartition(" got ")[2]

    with pytest.raises(UnsupportedProblemError) as raised:
        Problem(**fields)
    (answer,) = probe("bucket", [json.dumps(fields)])
    assert answer.startswith("error: ")
    assert gist(answer.removeprefix("error: ")) == gist(str(raised.value))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"seqlen": 1}', 'no field "seqlen"'),
        ('{"batch": "1"}', '"batch": expected a number, found a string'),
        ('{"batch": 1.5}', '"batch": expected an integer'),
        ('{"causal": 1}', '"causal": expected a boolean'),
        ("[]", "expected an object"),
        ("{", "byte 1"),
    ],
)
def test_what_is_no_problem_is_refused(probe: Probe, text: str, reason: str) -> None:
    (answer,) = probe("bucket", [text])
    assert answer.startswith("error: no problem in JSON")
    assert reason in answer


def test_params_are_those_of_python(probe: Probe) -> None:
    from attention_autotuner.operations.params import params_of

    plain = replace(SMALL, seqlen_k=50, dim_qk=72)
    bounded = replace(plain, key_bounds=True)
    for problem in (plain, bounded, replace(bounded, causal=True, causal_alignment="top_left")):
        (answer,) = probe("params", [json.dumps(values_of(problem))])
        expected: Any = params_of(problem)
        *numbers, scale = answer.split()
        names = ["struct_size", "abi_version", "seqlen_q", "causal", "causal_offset", "causal_from_end"]  # fmt: skip
        assert [int(text) for text in numbers] == [getattr(expected, name) for name in names]
        assert np.float32(scale) == expected.softmax_scale
    (refused,) = probe("params", ['{"direction": "backward"}'])
    assert "these params are for attention forward" in refused


def test_numbers_are_rounded_as_everywhere(probe: Probe) -> None:
    source = random.Random(2)
    values = [0.0, 1.0, -1.5, 65504.0, 65519.9, 65520.0, 1e30, 6e-8, 2.9e-8, 3e-8, -6.1e-5, 1e-40]
    values += [source.gauss(0, 1) * 2.0 ** source.randint(-28, 18) for _ in range(300)]
    for value, answer in zip(values, probe("round", [repr(v) for v in values]), strict=True):
        half, brain = (float(text) for text in answer.split())
        with np.errstate(over="ignore"):
            assert half == float(np.float64(value).astype(np.float16))
        # Through fp32 a second rounding could show: these values have no such tie.
        assert brain == float(torch.tensor(value, dtype=torch.float64).to(torch.bfloat16))


def write_index(
    root: Path, candidates: Sequence[Candidate], picks: Sequence[dict[str, Any]]
) -> None:
    """A bundle whose libraries nobody loads."""
    kernels = []
    for candidate in candidates:
        folder = root / "kernels" / candidate.name
        folder.mkdir(parents=True)
        library = folder / "kernel.so"
        library.write_text(candidate.name, encoding="utf-8")
        entry = kernel_of(candidate.name, library, root)
        kernels.append(entry | {"candidate": candidate.config})
    (root / "index.json").write_text(json.dumps(index_of(kernels, picks)), encoding="utf-8")


def test_picks_are_those_of_python(pick: Path, tmp_path: Path) -> None:
    source = random.Random(11)
    policy = arch.resolve("A100")
    # Few kinds, so that layers and distances decide and not the fixed fields alone.
    kinds: list[dict[str, Any]] = [
        {"op": "attention", "direction": "forward", "dtype": "fp16", "causal": True, "deterministic": False},
        {"op": "attention", "direction": "backward", "dtype": "bf16", "causal": False},
        {"op": "retention", "direction": "forward", "dtype": "fp16", "form": "auto", "causal": True},
        {"op": "gemm", "dtype": "bf16", "operands": "nt"},
    ]  # fmt: skip
    narrow = {"alignment_bytes": 16, "dim_v": 128}
    recorded = [random_problem(source, **kind, **narrow) for kind in kinds * 16]
    served = [(H100() if p.op == "gemm" else policy).default(p) for p in recorded]
    candidates = list(dict.fromkeys(served))
    picks = [
        pick_of(problem, candidates.index(candidate), source.choice(LAYERS))
        for problem, candidate in zip(recorded, served, strict=True)
    ]
    write_index(tmp_path, candidates, picks)
    bundle = open_bundle(tmp_path)
    layers = set()
    asked = [random_problem(source, **kind, **narrow) for kind in kinds * 60]
    for problem in [*asked, *recorded]:
        expected = bundled_pick(bundle, problem)
        done = ask(pick, "--bundle", tmp_path, "--problem-json", json.dumps(values_of(problem)))
        if expected is None:
            assert done.returncode == 1
            assert "has no kernel for" in done.stderr
            continue
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["name"] == expected.candidate.name
        assert document["layer"] == expected.layer
        assert document["recorded"] == expected.problem.describe()
        wanted = problem.bucketed() if expected.layer == "record" else problem.rounded()
        exact = expected.problem == wanted
        apart = 0.0 if exact else distance(wanted, expected.problem, bound=math.inf)
        assert (document["exact"], document["distance"]) == (exact, pytest.approx(apart, abs=1e-12))
        assert expected.layer == "default" or document["distance"] <= MAX_DISTANCE
        layers.add(document["layer"])
    assert layers == set(LAYERS)


def test_the_command_lists_and_explains(pick: Path, fake_bundle: Path) -> None:
    listed = run(pick, "--bundle", fake_bundle)
    assert "5 kernels for A100 (sm_80), 5 picks" in listed
    assert "retention_forward_decoding" in listed
    done = ask(
        pick,
        "--bundle",
        fake_bundle,
        "--check",
        "--load",
        "--problem-json",
        json.dumps(values_of(SMALL)),
    )
    assert json.loads(done.stdout)["name"] == "attention_forward_fake"
    assert "--problem-json" in run(pick, "--help")


@pytest.mark.parametrize(
    "arguments",
    [["--bundle"], ["--frob"], [], ["--bundle", "x", "--load"]],
)
def test_bad_flags_end_with_2(pick: Path, arguments: list[str]) -> None:
    done = ask(pick, *arguments)
    assert done.returncode == 2
    assert "--help lists the options" in done.stderr


def edited(root: Path, copy: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a bundle with another index."""
    shutil.copytree(root, copy)
    index = json.loads((copy / "index.json").read_text(encoding="utf-8"))
    change(index)
    (copy / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return copy


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda i: i.update(schema=2), '"schema" is 2, this program reads 1'),
        (lambda i: i.update(abi_version=9001), "speak ABI 9001"),
        (lambda i: i.pop("picks"), '"picks" is missing'),
        (lambda i: i["kernels"][1].pop("digest"), '"kernels"[1]: "digest" is missing'),
        (lambda i: i["kernels"][0].update(library="../x.so"), "inside the bundle"),
        (lambda i: i["kernels"][0].update(library="/x.so"), "inside the bundle"),
        (lambda i: i["picks"][2].update(kernel=5), '"picks"[2]: "kernel" is 5, there are 5'),
        (lambda i: i["picks"][0].update(layer="best"), '"picks"[0]: unknown layer "best"'),
        (lambda i: i["picks"][0]["problem"].pop("form"), '"picks"[0]: "form" is missing'),
        (lambda i: i["picks"][0]["problem"].update(dim_qk=7), '"picks"[0]: dim_qk must be'),
        (lambda i: i["picks"][0].update(median_us="fast"), "expected a number, found a string"),
        (
            lambda i: i["picks"][0].update(launch={"parts": 2}),
            '"picks"[0]: "launch" has "parts" = 2',
        ),
        (
            lambda i: i["picks"][0].update(launch={"splits": 0}),
            '"picks"[0]: "launch" has "splits" = 0',
        ),
        (
            lambda i: i["picks"][0].update(launch={"splits": 2**31}),
            '"launch" has "splits" = 2147483648',
        ),
        (lambda i: i["picks"][0].update(launch=3), "expected an object, found a number"),
    ],
)
def test_a_damaged_index_says_where(
    pick: Path, fake_bundle: Path, tmp_path: Path, change: Callable[[Any], None], reason: str
) -> None:
    done = ask(pick, "--bundle", edited(fake_bundle, tmp_path / "copy", change))
    assert done.returncode == 1
    assert reason in done.stderr


def test_picks_of_one_kernel_launch_it_with_their_own_knobs(probe: Probe, tmp_path: Path) -> None:
    splits = "((attention_autotuner_attention_forward_params const*)params)->splits"
    fake = Fake(
        name="attention_forward_fake", options=(f"-DWORKSPACE_BYTES=(size_t)(100 * {splits})",)
    )
    longer = [replace(SMALL, seqlen_k=keys) for keys in (256, 1024)]
    root = write_fake_bundle(tmp_path, [fake])

    def change(index: Any) -> None:
        index["picks"] += [
            pick_of(problem, 0) | {"launch": {"splits": splits}}
            for problem, splits in zip(longer, (4, 9), strict=True)
        ]

    bundle = edited(root, tmp_path / "copy", change)
    asked = [f"{bundle} {json.dumps(values_of(p))}" for p in (SMALL, *longer, SMALL)]
    assert probe("workspace", asked) == ["0", "400", "900", "0"]


def test_a_missing_bundle_says_what_writes_one(pick: Path, tmp_path: Path) -> None:
    done = ask(pick, "--bundle", tmp_path)
    assert done.returncode == 1
    assert "attention-autotuner export" in done.stderr
    done = ask(pick, "--bundle", "x" * 300)
    assert done.returncode == 1
    assert "index.json cannot be looked for: File name too long" in done.stderr


def test_damaged_libraries_are_noticed(pick: Path, fake_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(fake_bundle, copy)
    library = copy / "kernels" / "attention_forward_fake" / "kernel.so"
    content = library.read_bytes()
    library.write_bytes(content[:-10])
    assert "its index says" in load(pick, copy)
    library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "does not match the SHA-256" in load(pick, copy)
    assert "does not match the SHA-256" in load(pick, copy, "--check")
    library.unlink()
    assert "the bundle lacks" in load(pick, copy)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("attention_forward_fake", ("-DVERSION=2000",), "was built for ABI 2000"),
        ("attention_forward_other", (), "holds attention_forward_other, wanted"),
        ("attention_forward_fake", ("-Dattention_autotuner_prepare=other",), "it lacks attention_autotuner_prepare"),
    ],
)  # fmt: skip
def test_other_libraries_are_refused(
    pick: Path, tmp_path: Path, name: str, options: tuple[str, ...], reason: str
) -> None:
    root = write_fake_bundle(tmp_path, [Fake(name="attention_forward_fake")])
    library = compile_library(
        root / "kernels" / "attention_forward_fake", Fake(name=name, options=options)
    )

    def change(index: Any) -> None:
        index["kernels"][0] |= checks_of(library)

    assert reason in load(pick, edited(root, tmp_path / "copy", change))


def test_what_is_no_library_is_refused(pick: Path, tmp_path: Path) -> None:
    root = write_fake_bundle(tmp_path, [Fake(name="attention_forward_fake")])
    library = root / "kernels" / "attention_forward_fake" / "kernel.so"
    library.write_bytes(b"x" * library.stat().st_size)

    def change(index: Any) -> None:
        index["kernels"][0] |= checks_of(library)

    assert "cannot load the kernel library" in load(pick, edited(root, tmp_path / "copy", change))


@pytest.fixture(scope="module")
def example(cpp_programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example program, built against an installed client."""
    toolchain = find_toolchain()
    if not list(toolchain.cuda_root.glob("lib*/libcudart.so")):
        pytest.skip(f"{toolchain.cuda_root} has no shared CUDA runtime to link")
    root = tmp_path_factory.mktemp("example")
    run(toolchain.cmake, "--install", cpp_programs / "client", "--prefix", root / "prefix")
    prefix = f"-DCMAKE_PREFIX_PATH={root / 'prefix'}"
    cuda = f"-DCUDAToolkit_ROOT={toolchain.cuda_root}"
    cmake(toolchain, ROOT / "examples" / "cpp", root / "build", prefix, cuda)
    return root


def test_an_installed_client_is_found_and_serves_without_python(
    example: Path, fake_bundle: Path
) -> None:
    runtime = example / "libhost_cudart.so"
    run(
        "gcc", "-shared", "-fPIC", ROOT / "tests" / "build" / "cpp" / "host_cudart.c", "-o", runtime
    )
    done = ask(
        example / "build" / "attention", fake_bundle, "64", "48", environment={"LD_PRELOAD": str(runtime)}
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") == 4
    assert "attention_backward_fake (default)" in done.stdout
    assert "libpython" not in run("ldd", example / "build" / "attention")


def test_the_example_explains_itself(example: Path, tmp_path: Path) -> None:
    program = example / "build" / "attention"
    assert ask(program).returncode == 2
    done = ask(program, tmp_path)
    assert done.returncode == 1
    assert "there is no bundle at" in done.stderr


def test_the_installed_package_knows_its_version_and_the_abi(example: Path) -> None:
    (version,) = (example / "prefix").rglob("attention_autotunerConfigVersion.cmake")
    assert f'set(PACKAGE_VERSION "{__version__}")' in version.read_text(encoding="utf-8")
    header = example / "prefix" / "include" / "attention_autotuner" / "abi.h"
    assert f"ATTENTION_AUTOTUNER_ABI_VERSION {abi.ABI_VERSION}\n" in header.read_text("utf-8")
    assert not list((example / "prefix" / "include").rglob("*.cuh"))
