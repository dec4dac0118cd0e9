"""Python values and element types as C++ source text."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

NAMESPACE = "attention_autotuner"
"""Of the headers of this package; their folder has its name, too."""

_TYPES = {"fp16": "__half", "bf16": "__nv_bfloat16"}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_INT64_MAX = 2**63 - 1


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if 0x20 <= ord(char) < 0x7F:
        return char
    # Octal escapes end after three digits; hexadecimal ones would swallow digits that follow.
    return "".join(f"\\{byte:03o}" for byte in char.encode())


def cpp_literal(value: bool | int | str) -> str:
    """A C++ literal of a value.

    Args:
        value: a bool (``true``), an int that fits 64 bits, or a string (quoted, escaped to ASCII).

    Raises:
        TypeError: any other type, floats included: a float needs a decision about its precision first.
        ValueError: an int beyond 64 bits, which no C++ literal can hold.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if abs(value) > _INT64_MAX:
            raise ValueError(f"a C++ integer literal holds at most 64 bits, got {value}")
        return str(value)
    if isinstance(value, str):
        return '"' + "".join(_escape(char) for char in value) + '"'
    raise TypeError(f"no C++ literal for a {type(value).__name__}: {value!r}")


def cpp_type(dtype: str) -> str:
    """The CUDA element type of a dtype name.

    Raises:
        ValueError: the name is unknown.
    """
    if dtype not in _TYPES:
        raise ValueError(f"no C++ type for dtype {dtype!r}; known: {sorted(_TYPES)}")
    return _TYPES[dtype]


@dataclass(frozen=True, kw_only=True)
class CppMember:
    """A member of a generated struct: a constant, or a struct of its own.

    Attributes:
        name: in capitalised words: of the struct, and of the constant after its ``k``.
        type: of a constant; ``auto`` for an enumerator.
        value: C++ source of a constant.
        members: of a struct; None for a constant.
    """

    name: str
    type: str = ""
    value: str = ""
    members: tuple[CppMember, ...] | None = None


def cpp_name(name: str) -> str:
    """A name in capitalised words: ``BlockM`` of ``block_m``.

    Raises:
        ValueError: it is not a Python name in lower case with underscores.
    """
    if not name.isidentifier() or name != name.lower() or not name.strip("_"):
        raise ValueError(f"no C++ name of {name!r}: names are lower case with underscores")
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def cpp_enumerator(word: str, enum: str) -> str:
    """The enumerator of a word: ``attention_autotuner::CtaOrder::kRaster`` of ``raster`` and ``cta_order``.

    Raises:
        ValueError: one of the two is no such name.
    """
    return f"{NAMESPACE}::{cpp_name(enum)}::k{cpp_name(word)}"


def cpp_members(config: Any) -> tuple[CppMember, ...]:
    """The members of a struct that says what a dataclass instance says, in the order of its fields.

    A bool or an int is a constant, a string an enumerator of the enum that its field names, a dataclass instance a
    struct named like its field; what is None, or a launch knob, is left out.

    Args:
        config: a dataclass instance.

    Raises:
        TypeError: a field holds anything else.
    """
    return tuple(
        _member(field.name, value)
        for field in fields(config)
        if (value := getattr(config, field.name)) is not None and "launch" not in field.metadata
    )


def _member(name: str, value: object) -> CppMember:
    if is_dataclass(value) and not isinstance(value, type):
        return CppMember(name=cpp_name(name), members=cpp_members(value))
    if isinstance(value, str):
        return CppMember(name=cpp_name(name), type="auto", value=cpp_enumerator(value, name))
    if not isinstance(value, int):
        raise TypeError(f"no C++ constant for {name}, a {type(value).__name__}: {value!r}")
    kind = "bool" if isinstance(value, bool) else "int"
    return CppMember(name=cpp_name(name), type=kind, value=cpp_literal(value))
