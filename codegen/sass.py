"""Spills inside the main loops of a kernel, read from its machine code.

Compilers report how much a kernel spills, not where. A few spills before and after the loops are free; one inside a
loop around tensor-core instructions is paid on every pass. So: disassemble, build the control-flow graph, find its
natural loops, and look at those that hold tensor-core instructions.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.report import CompilerReport
from ..errors import ToolchainError
from .report import combine
from .tools import run_tool

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")
_ADDRESS = re.compile(r"\b0x([0-9a-f]+)")
_MMA = frozenset({"HMMA", "HGMMA"})  # mma.sync and wgmma on fp16 and bf16
_DISASSEMBLE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: byte offset in the function.
        opcode: without its modifiers, e.g. ``HMMA``.
        predicated: whether it may be skipped.
        target: branch target, for branches and convergence barriers.
    """

    address: int
    opcode: str
    predicated: bool
    target: int | None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop around tensor-core instructions.

    Attributes:
        start, end: addresses of its first and last instruction in code order.
        mma: tensor-core instructions.
        local_loads, local_stores: LDL and STL instructions.
    """

    start: int
    end: int
    mma: int
    local_loads: int
    local_stores: int

    @property
    def spills(self) -> bool:
        """True where local memory is touched on every pass."""
        return self.local_loads + self.local_stores > 0


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    opcode = match[3].split(".")[0]
    target = None
    if opcode in ("BRA", "BSSY", "UBRA"):
        addresses = _ADDRESS.findall(match[4])
        target = int(addresses[-1], 16) if addresses else None
    # A branch may also carry its condition as an operand: `BRA P0, 0x80`, `BRA.U UP1, 0x80`, `BRA.DIV UR4, 0x80`.
    conditional = match[2] is not None or (opcode == "BRA" and "," in match[4])
    return Instruction(
        address=int(match[1], 16), opcode=opcode, predicated=conditional, target=target
    )


def parse_sass(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each function in the output of ``cuobjdump --dump-sass``."""
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            current = functions.setdefault(match[1], [])
        elif current is not None and (instruction := _parse_instruction(line)):
            current.append(instruction)
    return functions


def _blocks(code: list[Instruction]) -> list[list[Instruction]]:
    """Split at branch targets and after branches."""
    leaders = {item.target for item in code if item.target is not None}
    blocks: list[list[Instruction]] = []
    fresh = True
    for item in code:
        if fresh or item.address in leaders:
            blocks.append([])
        blocks[-1].append(item)
        fresh = item.opcode in ("BRA", "UBRA", "EXIT", "RET", "BSYNC", "BSSY")
    return blocks


def _successors(blocks: list[list[Instruction]]) -> list[list[int]]:
    index = {block[0].address: number for number, block in enumerate(blocks)}
    successors: list[list[int]] = []
    for number, block in enumerate(blocks):
        last = block[-1]
        targets = []
        # BSSY only names where its threads meet again; the branches in between lead there.
        if last.opcode in ("BRA", "UBRA") and last.target in index:
            targets.append(index[last.target])
        leaves = last.opcode in ("BRA", "UBRA", "EXIT", "RET") and not last.predicated
        if not leaves and number + 1 < len(blocks):
            targets.append(number + 1)
        successors.append(targets)
    return successors


def _reachable(successors: list[list[int]], without: int | None = None) -> set[int]:
    """The blocks that the entry leads to, where it must go round one block."""
    reached: set[int] = set()
    pending = [0]
    while pending:
        block = pending.pop()
        if block != without and block not in reached:
            reached.add(block)
            pending.extend(successors[block])
    return reached


def _natural_loops(successors: list[list[int]]) -> list[frozenset[int]]:
    """The blocks of each loop; back edges to one header make one loop."""
    predecessors: list[list[int]] = [[] for _ in successors]
    for source in _reachable(successors):
        for target in successors[source]:
            predecessors[target].append(source)
    loops = []
    for header, sources in enumerate(predecessors):
        if len(sources) + (header == 0) < 2:
            continue  # a header has a way in and a way back
        # An edge is a back edge where its header dominates its source.
        pending = sorted(set(sources) - _reachable(successors, without=header))
        body = {header} if pending else set()
        while pending:
            block = pending.pop()
            if block not in body:
                body.add(block)
                pending.extend(predecessors[block])
        if body:
            loops.append(frozenset(body))
    return loops


def find_main_loops(code: list[Instruction], *, persistent: bool = False) -> list[Loop]:
    """The loops around tensor-core instructions, in code order, with what is inside them at any depth.

    Args:
        code: one function.
        persistent: the kernel's outermost loop is over tiles. It is then no main loop: what it spills around the
            loops inside it is paid once a tile, as it would be at the begin and end of a kernel that is not persistent.
    """
    if not code:
        return []
    blocks = _blocks(code)
    mma = {number for number, block in enumerate(blocks) if any(i.opcode in _MMA for i in block)}
    loops = [body for body in _natural_loops(_successors(blocks)) if body & mma]
    main = []
    for body in loops:
        holds_another = any(other < body for other in loops)
        outermost = not any(body < other for other in loops)
        if persistent and outermost and holds_another:
            continue
        items = [item for number in sorted(body) for item in blocks[number]]
        main.append(
            Loop(
                start=items[0].address,
                end=items[-1].address,
                mma=sum(item.opcode in _MMA for item in items),
                local_loads=sum(item.opcode == "LDL" for item in items),
                local_stores=sum(item.opcode == "STL" for item in items),
            )
        )
    return sorted(main, key=lambda loop: (loop.start, -loop.end))


def disassemble(library: Path, disassembler: Path) -> str:
    """The machine code of a library as text.

    Args:
        library: a shared library or object with CUDA code.
        disassembler: ``cuobjdump``, with ``nvdisasm`` beside it or on PATH.

    Raises:
        ToolchainError: the disassembler fails.
    """
    path = os.pathsep.join([str(disassembler.parent), os.environ.get("PATH", os.defpath)])
    done = run_tool(
        [disassembler, "--dump-sass", library],
        seconds=_DISASSEMBLE_SECONDS,
        variables={"PATH": path},
    )
    if done.returncode != 0:
        raise ToolchainError(f"{disassembler} cannot read {library}: {done.stdout.strip()[-500:]}")
    return done.stdout


def main_loops(
    library: Path, disassembler: Path, *, persistent: bool = False
) -> dict[str, list[Loop]]:
    """The main loops of every kernel in a library, by mangled name; see :func:`find_main_loops`.

    Raises:
        ToolchainError: the disassembler fails.
    """
    code = parse_sass(disassemble(library, disassembler))
    return {
        name: find_main_loops(instructions, persistent=persistent)
        for name, instructions in code.items()
    }


def add_loop_spills(report: CompilerReport, loops: dict[str, list[Loop]]) -> CompilerReport:
    """A report with ``loop_spills`` filled in for every kernel whose loops are known."""
    kernels = tuple(
        replace(kernel, loop_spills=any(loop.spills for loop in loops[kernel.name]))
        if kernel.name in loops
        else kernel
        for kernel in report.kernels
    )
    return combine(kernels, report.warnings)
