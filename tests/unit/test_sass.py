from __future__ import annotations

from pathlib import Path

import pytest

from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.codegen.sass import (
    Instruction,
    Loop,
    add_loop_spills,
    disassemble,
    find_main_loops,
    parse_sass,
)
from attention_autotuner.errors import ToolchainError

# Five kernels around mma.sync, disassembled from what nvcc 13.0 made for sm_80: local memory is used nowhere (clean),
# in the main loop (inside), only outside of it (around), in an outer loop over tiles (outer), and in a loop without
# tensor-core instructions (no_mma).
SASS = Path(__file__).with_name("compiler_output") / "sass_sm80_loops.txt"


@pytest.fixture(scope="module")
def functions() -> dict[str, list[Instruction]]:
    return parse_sass(SASS.read_text(encoding="utf-8"))


def _spills(loops: list[Loop]) -> bool:
    return any(loop.spills for loop in loops)


def test_every_function_is_read_completely(functions: dict[str, list[Instruction]]) -> None:
    assert set(functions) == {"clean", "inside", "around", "outer", "no_mma"}
    for code in functions.values():
        assert [item.address for item in code] == list(range(0, 16 * len(code), 16))


@pytest.mark.parametrize(
    ("name", "persistent", "loops", "spills"),
    [
        ("clean", False, 2, False),
        ("inside", False, 2, True),
        ("around", False, 2, False),
        ("outer", False, 2, True),
        ("outer", True, 1, False),
        ("inside", True, 2, True),
        ("no_mma", False, 0, False),
    ],
)
def test_main_loops(
    functions: dict[str, list[Instruction]], name: str, persistent: bool, loops: int, spills: bool
) -> None:
    loops_found = find_main_loops(functions[name], persistent=persistent)
    assert len(loops_found) == loops
    assert _spills(loops_found) is spills
    assert all(loop.mma > 0 for loop in loops_found)


def _code(*lines: str) -> list[Instruction]:
    """Instructions 16 bytes apart; `@label` operands name a line by its index."""
    text = "\tFunction : f\n"
    for number, line in enumerate(lines):
        for target in range(len(lines)):
            line = line.replace(f"@{target};", f"{16 * target:#x} ;")
        text += f"        /*{16 * number:04x}*/      {line}\n"
    return parse_sass(text)["f"]


@pytest.mark.parametrize(
    ("rare", "local_loads"), [("FADD R4, R4, R5 ;", 0), ("LDL.LU R4, [R1+0x10] ;", 1)]
)
def test_a_block_moved_out_of_line_belongs_to_its_loop(rare: str, local_loads: int) -> None:
    # The loop is 1..3; its rare part 6..7 lies behind the epilogue 4..5, which spills and is in no loop.
    code = _code(
        "MOV R1, R2 ;",
        "HMMA.16816.F32 R4, R8, R10, R4 ;",
        "@P0 BRA @6;",
        "@P1 BRA @1;",
        "STL [R1], R4 ;",
        "EXIT ;",
        rare,
        "BRA @3;",
    )
    assert find_main_loops(code) == [
        Loop(start=16, end=112, mma=1, local_loads=local_loads, local_stores=0)
    ]


def test_code_that_only_jumps_back_past_a_loop_is_not_in_it() -> None:
    # 5..6 jumps back to 3, behind the loop 1..2: no loop around the tensor-core instruction holds the store.
    code = _code(
        "@P0 BRA @5;",
        "HGMMA.64x64x16.F32 R4, gdesc[UR4], R4 ;",
        "@P1 BRA @1;",
        "MOV R1, R2 ;",
        "EXIT ;",
        "STL.64 [R1], R4 ;",
        "BRA @3;",
    )
    assert find_main_loops(code) == [Loop(start=16, end=32, mma=1, local_loads=0, local_stores=0)]


def test_conditions_in_operands_and_predicated_exits_fall_through() -> None:
    code = _code(
        "HMMA.16816.F32 R4, R8, R10, R4 ;",
        "@!P0 EXIT ;",
        "STL [R1], R4 ;",
        "BRA.U UP0, @0;",
        "EXIT ;",
    )
    (loop,) = find_main_loops(code)
    assert (loop.start, loop.end, loop.local_stores) == (0, 48, 1)


def test_the_padding_after_a_function_is_no_loop() -> None:
    assert (
        find_main_loops(_code("HMMA.16816.F32 R4, R8, R10, R4 ;", "EXIT ;", "BRA @2;", "NOP ;"))
        == []
    )
    assert find_main_loops([]) == []


def test_reports_gain_what_the_code_shows(functions: dict[str, list[Instruction]]) -> None:
    report = parse_ptxas(
        "".join(
            f"ptxas info    : Compiling entry function '{name}' for 'sm_80'\n"
            "ptxas info    : Used 30 registers, used 0 barriers, 372 bytes cmem[0]\n"
            for name in ("clean", "inside", "elsewhere")
        )
    )
    loops = {name: find_main_loops(functions[name]) for name in ("clean", "inside")}
    loops_found = add_loop_spills(report, loops)
    assert {kernel.name: kernel.loop_spills for kernel in loops_found.kernels} == {
        "clean": False,
        "inside": True,
        "elsewhere": None,
    }
    assert loops_found.loop_spills is True


def test_a_disassembler_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"cannot run .*no-such-tool"):
        disassemble(tmp_path / "kernel.so", tmp_path / "no-such-tool")
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho no such format >&2\nexit 3\n")
    tool.chmod(0o755)
    with pytest.raises(ToolchainError, match="no such format"):
        disassemble(tmp_path / "kernel.so", tool)
