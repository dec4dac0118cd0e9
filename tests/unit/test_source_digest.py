from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.arch import A100
from attention_autotuner.codegen.render import RenderedKernel, include_root, kernel_digest, render
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.codegen.tokens import END_OF_DIRECTIVE, GLUED, tokens
from attention_autotuner.core.problem import Problem

KERNEL = render(A100().default(Problem(dim_qk=64, dim_v=64)))


def spelled(text: str) -> list[str]:
    return tokens(text)


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int  x=1 ;// why", ["int", "x", "=", "1", ";"]),
        ("a /* b */ c /**/d", ["a", "c", "d"]),
        ("// one \\\ntwo\nthree", ["three"]),
        ("1'000'000 0x1p+3 1e-5f .5 1.5e+3", ["1'000'000", "0x1p+3", "1e-5f", ".5", "1.5e+3"]),
        ("'a' '\\'' L'x' u8'y' '//'", ["'a'", "'\\''", "L'x'", "u8'y'", "'//'"]),
        (r'"a // b" "\"/*" u"x"', ['"a // b"', r'"\"/*"', 'u"x"']),
        ('R"(a " // b\n)" + 1', ['R"(a " // b\n)"', "+", "1"]),
        ('u8R"x()" )x" y', ['u8R"x()" )x"', "y"]),
        ('ownR"(x)"', ["ownR", '"(x)"']),
        ("f<<<1, 2>>>(a->b)", ["f", "<<<", "1", ",", "2", ">>>", "(", "a", "->", "b", ")"]),
        ("a<<=b>>c<=>d ::e...", ["a", "<<=", "b", ">>", "c", "<=>", "d", "::", "e", "..."]),
        ("long\\\nname = \\\n 2", ["longname", "=", "2"]),
        ('"two \\\nparts"', ['"two parts"']),
        ('R"(kept \\\nas it is)"', ['R"(kept \\\nas it is)"']),
        ("größe", ["größe"]),
        ("a \t", ["a"]),
        ("", []),
        ("case'a': x // the end", ["case", "'a'", ":", "x"]),
    ],
)
def test_tokens_are_those_of_the_language(text: str, expected: list[str]) -> None:
    assert spelled(text) == expected
    assert spelled(text.replace("\n", "\r\n"))[:1] == [
        item.replace("\n", "\r\n") for item in expected[:1]
    ]


def test_a_directive_ends_with_its_line() -> None:
    item = spelled("#define X 1\nint y;")
    assert item == ["#", "define", "X", " ", "1", END_OF_DIRECTIVE, "int", "y", ";"]
    assert item != spelled("#define X 1 int y;\n")
    assert item == spelled("  #  define X /* a\n comment */ \\\n 1 // why\n\n int y;")
    assert spelled("#if A\n#endif") == [
        "#", "if", "A", END_OF_DIRECTIVE, "#", "endif", END_OF_DIRECTIVE,
    ]  # fmt: skip


def test_a_macro_with_arguments_is_none_without() -> None:
    assert spelled("#define F(x) x")[3:5] == [GLUED, "("]
    assert spelled("#define F(x) x") != spelled("#define F (x) x")
    assert spelled("#define F(x) x") == spelled("#define F( x )  x")


def test_includes_say_nothing() -> None:
    assert spelled('#pragma once\n#include <a/b.h>\n # include "c.cuh" // why\nint x;') == spelled(
        "int x;"
    )
    assert spelled("#pragma unroll\n") == ["#", "pragma", "unroll", END_OF_DIRECTIVE]


# --- the digest -----------------------------------------------------------------------------------


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    return Path(shutil.copytree(include_root(), tmp_path / "include"))


def edited(headers: Path, name: str, old: str, new: str) -> None:
    path = headers / "attention_autotuner" / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_layout_and_names_for_people_do_not_count() -> None:
    digest = source_digest(KERNEL)
    laid_out = KERNEL.text.replace("\n", "\n\n").replace(";", " ; // end")
    assert source_digest(replace(KERNEL, text=laid_out)) == digest
    assert kernel_digest(replace(KERNEL, text=laid_out)) != kernel_digest(KERNEL)
    other = RenderedKernel(
        candidate=KERNEL.candidate, name="other", text=KERNEL.text.replace(KERNEL.name, "other")
    )
    assert source_digest(other) == digest
    assert source_digest(replace(KERNEL, text=KERNEL.text.replace(" 64;", " 32;"))) != digest


def test_a_header_may_be_split_off_into_an_empty_one(headers: Path) -> None:
    digest = source_digest(KERNEL, headers)
    assert digest == source_digest(KERNEL)
    (headers / "attention_autotuner" / "all.cuh").write_text(
        '#pragma once\n#include "common/scalars.cuh"\n'
    )
    edited(
        headers,
        "score/softmax.cuh",
        '#include "attention_autotuner/common/scalars.cuh"',
        '#include "attention_autotuner/all.cuh"',
    )
    assert source_digest(KERNEL, headers) == digest


def test_a_changed_token_counts(headers: Path) -> None:
    digest = source_digest(KERNEL, headers)
    edited(headers, "score/softmax.cuh", "namespace attention_autotuner {", "namespace another {")
    assert source_digest(KERNEL, headers) != digest
