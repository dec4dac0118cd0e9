from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.cpp import (
    CppMember,
    cpp_enumerator,
    cpp_literal,
    cpp_members,
    cpp_name,
    cpp_type,
)


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        (True, "true"),
        (False, "false"),
        (0, "0"),
        (-7, "-7"),
        (2**63 - 1, "9223372036854775807"),
        ("", '""'),
        ("a b", '"a b"'),
        ('say "hi"\\\n', '"say \\"hi\\"\\\\\\n"'),
        ("\x01" + "1", '"\\0011"'),
        ("é", '"\\303\\251"'),
    ],
)
def test_literals(value: Any, literal: str) -> None:
    assert cpp_literal(value) == literal


@pytest.mark.parametrize("value", [1.0, None, b"x", (1,), [1]])
def test_other_types_have_no_literal(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        cpp_literal(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_integers_beyond_64_bits_have_no_literal(value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        cpp_literal(value)


def test_a_compiler_reads_strings_back(tmp_path: Path) -> None:
    text = "".join(map(chr, range(1, 0x180))) + '"\\?%s??/0'
    source = tmp_path / "literal.cpp"
    source.write_text(f"#include <cstdio>\nint main() {{ fputs({cpp_literal(text)}, stdout); }}\n")
    subprocess.run(["g++", "-std=c++17", source, "-o", tmp_path / "literal"], check=True)
    done = subprocess.run([tmp_path / "literal"], check=True, stdout=subprocess.PIPE)
    assert done.stdout == text.encode()


def test_types() -> None:
    assert cpp_type("fp16") == "__half"
    assert cpp_type("bf16") == "__nv_bfloat16"
    with pytest.raises(ValueError, match="fp8"):
        cpp_type("fp8")


@dataclass(frozen=True)
class Inner:
    block_m: int
    scores: str = "inline"


@dataclass(frozen=True)
class Outer:
    cta_order: str
    q_in_registers: bool
    dq: Inner | None = None
    dk: Inner | None = None


def test_members_follow_the_fields_of_a_dataclass() -> None:
    assert cpp_members(Outer("raster", True, dq=Inner(64))) == (
        CppMember(name="CtaOrder", type="auto", value="attention_autotuner::CtaOrder::kRaster"),
        CppMember(name="QInRegisters", type="bool", value="true"),
        CppMember(
            name="Dq",
            members=(
                CppMember(name="BlockM", type="int", value="64"),
                CppMember(name="Scores", type="auto", value="attention_autotuner::Scores::kInline"),
            ),
        ),
    )


def test_a_field_that_no_constant_can_hold_is_named() -> None:
    @dataclass
    class Wrong:
        scale: float = 0.5

    with pytest.raises(TypeError, match=r"no C\+\+ constant for scale, a float: 0\.5"):
        cpp_members(Wrong())


@pytest.mark.parametrize("name", ["", "_", "two words", "kBlockM", "1st", "a-b"])
def test_names_are_lower_case_with_underscores(name: str) -> None:
    with pytest.raises(ValueError, match="no C\\+\\+ name of"):
        cpp_name(name)


def test_an_enumerator_is_named_by_its_field_and_its_word() -> None:
    assert cpp_enumerator("one_pass", "plan") == "attention_autotuner::Plan::kOnePass"
