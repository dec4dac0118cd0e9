"""Python values and element types as C++ source text."""

from __future__ import annotations

_TYPES = {
    "fp16": "__half",
    "bf16": "__nv_bfloat16",
}
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
