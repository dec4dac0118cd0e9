"""CUDA C++ as C++ for the emulated machine: inline assembly, launches and shared memory become calls."""

from __future__ import annotations

import re
from itertools import count

_ASM = re.compile(r"\basm\b(?:\s+volatile)?\s*\(")
_STRING = re.compile(r'"((?:\\.|[^"\\])*)"')
_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\((\d+)\)\s+)?([\w ]+?)\s+(\w+)\[\];")
_STATIC_SHARED = re.compile(r"\b__shared__\s+(\w+)\s+(\w+)\[[^\]]+\];")
_REGISTER = {
    "pred": "bool",
    "b32": "uint32_t",
    "u32": "uint32_t",
    "f32": "float",
    "b64": "uint64_t",
}
_OPERAND = {"r": "uint32_t", "l": "uint64_t", "f": "float", "h": "uint16_t", "n": "int"}
_SPECIAL = {
    "%tid.x": "::emulation::thread_index().x",
    "%ctaid.x": "::emulation::block_index().x",
    "%cluster_ctarank": "uint32_t(::emulation::current->cta->rank)",
}
_HOPPER = "defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900"
_INDEX = re.compile(r"(?<![\w.>])(thread|block|grid)(Idx|Dim)\b")
_OPEN, _CLOSE = "([{", ")]}"


def rewrite(text: str) -> str:
    """The text of a header or a kernel, for the emulated machine.

    Raises:
        ValueError: the text has inline assembly or a launch that is not understood.
    """
    text = _SHARED.sub(
        lambda match: (
            f"{match[2]}* const {match[3]} = "
            f"::emulation::dynamic_shared<{match[2]}>({match[1] or 16});"
        ),
        text,
    )
    text = _STATIC_SHARED.sub(r"\1* const \2 = ::emulation::static_shared<\1>();", text)
    text = _INDEX.sub(
        lambda match: f"::emulation::{match[1]}_{'index' if match[2] == 'Idx' else 'dim'}()", text
    )
    return _launches(_assembly(text.replace(_HOPPER, "true")))


def mangled(opcode: str) -> str:
    """The function of ``runtime/ptx.h`` for an instruction."""
    return opcode.replace("::", "_").replace(".", "_")


def _end(text: str, start: int) -> int:
    """The place behind the bracket that closes the one before ``start``."""
    depth, at = 1, start
    while depth:
        string = _STRING.match(text, at)
        if string:
            at = string.end()
            continue
        depth += (text[at] in _OPEN) - (text[at] in _CLOSE)
        at += 1
    return at


def _split(text: str, separator: str) -> list[str]:
    """The pieces of a text between separators outside of brackets and strings."""
    pieces, begin, at = [], 0, 0
    while at < len(text):
        string = _STRING.match(text, at)
        if string:
            at = string.end()
        elif text[at] in _OPEN:
            at = _end(text, at + 1)
        elif text[at] == separator:
            pieces.append(text[begin:at])
            begin = at = at + 1
        else:
            at += 1
    return [*pieces, text[begin:]]


def _assembly(text: str) -> str:
    made, last, numbers = [], 0, count()
    for match in _ASM.finditer(text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if "//" in line or match.start() < last:
            continue
        end = _end(text, match.end())
        made += [text[last : match.start()], _statement(text[match.end() : end - 1], next(numbers))]
        last = end
    return "".join([*made, text[last:]])


def _statement(body: str, number: int) -> str:
    """Inline assembly without its parentheses as a C++ statement."""
    template, *sections = _split(body, ":")
    code = "".join(_STRING.findall(template)).replace("\\n", "\n").replace("%%", "%")
    operands = [
        (*_STRING.findall(text)[:1], text[text.index("(") + 1 : text.rindex(")")])
        for section in sections[:2]
        for text in _split(section, ",")
        if text.strip()
    ]
    before, after = [], []
    for index, (constraint, expression) in enumerate(operands):
        kind = _OPERAND[constraint[-1]]
        initial = "{}"
        if not constraint.startswith("="):
            convert = "::emulation::long_operand" if kind == "uint64_t" else kind
            initial = f" = {convert}({expression})"
        before.append(f"[[maybe_unused]] {kind} operand_{index}{initial};")
        if constraint[0] in "=+":
            after.append(f"{expression} = operand_{index};")
    if not code.strip():
        return "do {} while (false)"
    calls = [_instruction(line, number) for line in re.split(r"[;\n]", code) if line.strip()]
    return " ".join(["do {", *before, *calls, *after, "} while (false)"])


def _instruction(line: str, number: int) -> str:
    line = line.strip()
    if line in "{}":
        return line
    if label := re.fullmatch(r"(\w+):", line):
        return f"{label[1]}_{number}:"
    if register := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", line):
        return f"{_REGISTER[register[1]]} {register[2]};"
    guard = ""
    if guarded := re.fullmatch(r"@(!?)(\w+)\s+(.*)", line):
        guard, line = f"if ({guarded[1]}{guarded[2]}) ", guarded[3]
    opcode, _, rest = line.partition(" ")
    if opcode == "bra":
        return f"{guard}goto {rest.strip()}_{number};"
    if not re.fullmatch(r"[a-z][\w.:]*", opcode):
        raise ValueError(f"no instruction: {line!r}")
    operands = [word.strip() for word in re.sub(r"[\[\]{}]", "", rest).split(",")]
    values = [
        _SPECIAL.get(word) or re.sub(r"^%(\d+)$", r"operand_\1", word)
        for word in operands
        if word not in ("", "_")
    ]
    return f"{guard}::emulation::ptx::{mangled(opcode)}({', '.join(values)});"


def _launches(text: str) -> str:
    while (at := text.find("<<<")) >= 0:
        begin = len(text[:at].rstrip())
        if text[begin - 1] == ">":
            depth = 0
            while True:
                begin -= 1
                depth += (text[begin] == ">") - (text[begin] == "<")
                if not depth:
                    break
        while re.match(r"[\w:]", text[begin - 1]):
            begin -= 1
        close = text.index(">>>", at)
        settings = [part.strip() for part in _split(text[at + 3 : close], ",")]
        settings += ["0"] * (3 - len(settings)) + ["nullptr"] * (len(settings) < 4)
        end = _end(text, text.index("(", close) + 1)
        arguments = text[text.index("(", close) + 1 : end - 1]
        call = f"::emulation::launch({', '.join([*settings, text[begin:at]])}, {arguments})"
        text = text[:begin] + call + text[end:]
    return text
