"""Identity by content: one digest function for problems, candidates, artifacts and records.

The encoding is canonical and tagged by type, so that ``1``, ``True``, ``"1"`` and ``1.0`` differ, field names take
part, and a value it does not know is an error rather than a silent collision.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

LATER = {"later": True}
"""Metadata of a field that identities from before it know nothing of: it takes part where it is not its default."""


def is_later(field: dataclasses.Field[Any]) -> bool:
    """True for a field that is marked :data:`LATER`, whatever else its metadata say."""
    return bool(LATER.items() <= field.metadata.items())


def later_words(*words: str) -> dict[str, Any]:
    """Metadata of a field with words that identities from before them know nothing of: none of those says one."""
    return {"later_words": words}


def is_later_word(field: dataclasses.Field[Any], word: object) -> bool:
    """True for a word that is marked by :func:`later_words`."""
    return word in field.metadata.get("later_words", ())


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, bool, Any], ...]:
    """Of each field of a dataclass its name, whether it is marked :data:`LATER`, and its default."""
    return tuple((field.name, is_later(field), field.default) for field in dataclasses.fields(kind))


def values_of(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass instance by name, but for those marked :data:`LATER` that hold their default."""
    kind: type = type(instance)
    values = ((field, getattr(instance, field[0])) for field in _fields(kind))
    return {
        name: value for (name, later, default), value in values if not later or value != default
    }


def stated(value: Any) -> Any:
    """As :func:`plain`, without fields marked :data:`LATER` that hold their default, which readers supply."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: stated(held) for name, held in values_of(value).items()}
    return tuple(map(stated, value)) if isinstance(value, tuple) else value


def plain(value: Any) -> Any:
    """The dictionary of ``dataclasses.asdict``, of frozen dataclasses of values that cannot change, in less time."""
    kind: type = type(value)
    if dataclasses.is_dataclass(kind):
        return {name: plain(getattr(value, name)) for name, *_ in _fields(kind)}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def encode(value: Any) -> bytes:
    """A canonical byte string for a value.

    Args:
        value: None, bool, int, float, str, bytes, a tuple or list, a mapping with string keys, or a dataclass
            instance of these, nested freely.

    Raises:
        TypeError: the value has a type this encoding does not know.
    """
    if value is None:
        return b"n;"
    if isinstance(value, bool):
        return b"t;" if value else b"f;"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, float):
        return b"d" + value.hex().encode() + b";"
    if isinstance(value, str):
        raw = value.encode()
        return b"s%d:" % len(raw) + raw + b";"
    if isinstance(value, bytes):
        return b"b%d:" % len(value) + value + b";"
    if isinstance(value, (tuple, list)):
        return b"l%d:" % len(value) + b"".join(encode(item) for item in value) + b";"
    if isinstance(value, Mapping):
        items = []
        for key in sorted(value):
            if not isinstance(key, str):
                raise TypeError(f"cannot derive an identity from a {type(key).__name__} key")
            items.append(encode(key) + encode(value[key]))
        return b"m%d:" % len(items) + b"".join(items) + b";"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        body = b"".join(encode(name) + encode(held) for name, held in values_of(value).items())
        return b"c" + encode(type(value).__name__) + body + b";"
    raise TypeError(f"cannot derive an identity from a {type(value).__name__}: {value!r}")


def digest(*values: Any) -> str:
    """The SHA-256 of the canonical encoding, as 64 hex characters."""
    return hashlib.sha256(encode(list(values))).hexdigest()


def digest16(*values: Any) -> str:
    """The first 16 hex characters of :func:`digest`, for names of files and folders."""
    return digest(*values)[:16]


def slug(text: str) -> str:
    """A file-system form of a name: lower case, runs of other characters as one dash."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"
