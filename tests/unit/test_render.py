from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, fields, replace
from pathlib import Path

import jinja2
import pytest

from attention_autotuner.codegen.environment import environment, template_root
from attention_autotuner.codegen.render import (
    GeneratedCode,
    abi_version,
    include_closure,
    include_root,
    kernel_digest,
    render,
)
from attention_autotuner.core import abi
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.errors import BuildError
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from tests.candidates import ROWS, backward, forward

GOLDEN = Path(__file__).with_name("golden")
SMALL = Candidate(
    dtype="fp16",
    padded_dim_qk=64,
    padded_dim_v=64,
    knobs=ForwardKnobs(
        block_m=128,
        block_n=64,
        warps_m=4,
        num_stages=2,
        k_slice=64,
    ),
)
LARGE = forward(
    SMALL,
    dtype="bf16",
    padded_dim_qk=256,
    padded_dim_v=512,
    block_m=64,
    block_n=32,
    warps_m=2,
    warps_n=4,
    num_stages=1,
    q_in_registers=True,
    qk_ahead=True,
    k_slice=128,
    v_slices=2,
    persistent=True,
    cta_order="longest_first",
    ctas_per_sm=2,
    copy_bytes=2,
)


PAIR = backward("two_kernels")
SPLIT = backward(
    "three_kernels",
    dtype="bf16",
    padded_dim_v=512,
    copy_bytes=2,
    dv=replace(ROWS, column_warps=2, slices=2),
    cta_order="longest_first",
)


@pytest.mark.parametrize(
    "candidate", [SMALL, LARGE, PAIR, SPLIT], ids=["small", "large", "two_kernels", "three_kernels"]
)
def test_golden(candidate: Candidate) -> None:
    """Rendered text is reviewed as a diff; `UPDATE_GOLDEN=1 pytest tests/unit/test_render.py` accepts a change."""
    path = GOLDEN / f"{candidate.name}.cu"
    text = render(candidate).text
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {
        selected.name for selected in (SMALL, LARGE, PAIR, SPLIT)
    }


def _nameless(candidate: Candidate) -> str:
    """A candidate's text without its name, which alone would make any two texts differ."""
    lines = render(candidate).text.splitlines()
    return "\n".join(line for line in lines if "name" not in line.lower())


def test_every_forward_knob_reaches_the_text() -> None:
    texts = [_nameless(SMALL)]
    changes = {field.name: getattr(LARGE, field.name) for field in fields(LARGE)}
    del changes["knobs"]
    for name, value in (changes | asdict(LARGE.knobs)).items():
        changed = forward(SMALL, **{name: value})
        if changed != SMALL:
            texts.append(_nameless(changed))
    assert len(texts) > 15
    assert len(set(texts)) == len(texts)


def test_every_backward_knob_reaches_the_text() -> None:
    ones = [PAIR, backward("one_pass"), backward("three_kernels")]
    ones += [
        backward("two_kernels", **{name: replace(pass_knobs, **{knob: 2 * value})})
        for name, pass_knobs in PAIR.knobs.passes.items()
        for knob, value in asdict(pass_knobs).items()
    ]
    ones += [
        backward("three_kernels", **{name: replace(ROWS, slices=3)}) for name in ("dq", "dk", "dv")
    ]
    ones += [
        backward("two_kernels", **change)
        for change in ({"cta_order": "longest_first"}, {"padded_dim_v": 64})
    ]
    texts = [_nameless(selected) for selected in ones]
    assert len(set(texts)) == len(texts) > 20


def test_undefined_names_are_errors() -> None:
    template = environment().from_string("{{ candidate.no_such_knob }}")
    with pytest.raises(jinja2.UndefinedError, match="no_such_knob"):
        template.render(candidate=SMALL)


def test_there_is_one_template_and_it_is_short() -> None:
    (path,) = template_root().rglob("*.jinja")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120


def test_a_generated_expression_enters_through_its_hook() -> None:
    plain = render(SMALL).text
    modified = render(SMALL, GeneratedCode(score="score * 0.5f")).text
    assert "return score * 0.5f;" in modified
    added = set(modified.splitlines()) - set(plain.splitlines())
    assert len(added) == 2  # the comment and the function
    assert set(plain.splitlines()) < set(modified.splitlines())


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_closure_is_transitive_and_ours_alone(tmp_path: Path) -> None:
    files = {
        "attention_autotuner/a.cuh": '#pragma once\n#include "b.cuh"\n  #  include <cute/layout.hpp>\n',
        "attention_autotuner/b.cuh": '#include "detail/c.cuh"\n#include <attention_autotuner/a.cuh>\n',
        "attention_autotuner/detail/c.cuh": '#include <cstdint>\n#include "../d.cuh"\n',
        "attention_autotuner/d.cuh": "// #include <attention_autotuner/none.cuh>\n",
        "attention_autotuner/unused.cuh": "",
    }
    closure = include_closure("#include <attention_autotuner/a.cuh>\n", _write(tmp_path, files))
    del files["attention_autotuner/unused.cuh"]
    assert closure == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())
    }


def test_an_edited_header_changes_the_closure(tmp_path: Path) -> None:
    root = _write(tmp_path, {"attention_autotuner/a.cuh": "int x;\n"})
    text = "#include <attention_autotuner/a.cuh>\n"
    before = include_closure(text, root)
    _write(root, {"attention_autotuner/a.cuh": "int xy;\n"})
    assert include_closure(text, root) != before


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("#include <attention_autotuner/none.cuh>\n", ["none.cuh", "the rendered kernel"]),
        ('#include "none.h"\n', ["none.h"]),
        ("#include <attention_autotuner/a.cuh>\n", ["missing.cuh", "attention_autotuner/a.cuh"]),
    ],
)
def test_missing_headers_are_named(tmp_path: Path, text: str, named: list[str]) -> None:
    root = _write(tmp_path, {"attention_autotuner/a.cuh": '#include "missing.cuh"\n'})
    with pytest.raises(BuildError) as caught:
        include_closure(text, root)
    assert all(part in str(caught.value) for part in named)


def test_closure_of_a_real_kernel() -> None:
    closure = include_closure(render(SMALL).text)
    assert {
        "attention_autotuner/abi.h",
        "attention_autotuner/scores_forward_sm80/entry.cuh",
    } <= set(closure)
    for name, digest in closure.items():
        assert hashlib.sha256((include_root() / name).read_bytes()).hexdigest() == digest


def test_abi_version_is_the_mirrors() -> None:
    assert abi_version() == abi.ABI_VERSION


def test_kernel_digest_follows_the_text_not_the_name() -> None:
    kernel = render(SMALL)
    assert kernel_digest(kernel) == kernel_digest(replace(kernel, name="other"))
    assert kernel_digest(kernel) != kernel_digest(replace(kernel, text=kernel.text + "\n"))
