"""Kernels by name: what one is called, what its knobs can say, and a candidate's JSON form.

The one place that knows which knob class belongs to which kernel. A kernel that has several says which one a config is
of by a *variant*; nothing is told from the names of fields.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .identity import digest16
from .knobs import BackwardKnobs, ForwardKnobs, Knobs, ParallelKnobs
from .retention_knobs import (
    ChunkwiseKnobs,
    RecurrentKnobs,
    RetentionBackwardKnobs,
    WgmmaChunkwiseKnobs,
)
from .wgmma_knobs import WgmmaBackwardKnobs, WgmmaForwardKnobs

_KINDS: dict[str, dict[str, type[Knobs]]] = {
    "scores_forward_sm80": {"scores": ForwardKnobs, "parallel": ParallelKnobs},
    "scores_forward_sm90": {"": WgmmaForwardKnobs},
    "scores_backward_sm80": {"": BackwardKnobs},
    "scores_backward_sm90": {"": WgmmaBackwardKnobs},
    "chunks_sm80": {"forward": ChunkwiseKnobs, "backward": RetentionBackwardKnobs},
    "chunks_sm90": {"": WgmmaChunkwiseKnobs},
    "recurrent_sm80": {"": RecurrentKnobs},
}
"""Kernel -> variant -> knob class; the variant is empty where there is one alone."""

_RENAMED: dict[str, dict[str, str]] = {}
"""Kernel -> old word -> new word, for those whose fields or words have changed since records were written."""

_NAMES = {
    kind: (kernel, variant) for kernel, kinds in _KINDS.items() for variant, kind in kinds.items()
}


def kernel_names() -> tuple[str, ...]:
    """Every kernel, in a fixed order."""
    return tuple(_KINDS)


def kernel_name(knobs: Knobs) -> str:
    """The kernel that knobs are of."""
    return _NAMES[type(knobs)][0]


def variant(knobs: Knobs) -> str:
    """Which of its kernel's knob classes they are of; empty where it has one alone."""
    return _NAMES[type(knobs)][1]


def kernel_family(kernel: str) -> str:
    """The family that a kernel is of, which ends its name."""
    return kernel.rpartition("_")[2]


def renamed(kernel: str) -> Mapping[str, str]:
    """Old names of a kernel's fields and words, and what they are now; empty for a kernel of none."""
    return _RENAMED.get(kernel, {})


@lru_cache(maxsize=64)
def knob_schema(kernel: str, variant: str = "") -> str:
    """Digest of what the knobs of a kernel can say: their names, those of nested ones, and the words that some take.

    A change of one kernel's knobs changes no other's.

    Args:
        kernel: its name.
        variant: which of its knob classes, see :func:`variant`.

    Raises:
        KeyError: there is no such kernel or variant.
    """
    return digest16("knobs", kernel, variant, list(_vocabulary(_KINDS[kernel][variant])))


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _vocabulary(kind: Any) -> Iterator[object]:
    hints = _hints(kind)
    for field in fields(kind):
        yield [field.name, list(_words(hints[field.name]))]


def _words(hint: Any) -> Iterator[object]:
    """The words that a field can hold, or a nested knob class's vocabulary."""
    if is_dataclass(hint) and isinstance(hint, type):
        yield from _vocabulary(hint)
    elif get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    else:
        for inner in get_args(hint):
            yield from _words(inner)


def encode(knobs: Knobs) -> dict[str, Any]:
    """Knobs as JSON-ready values: ``kernel``, ``variant`` where there are several, and ``knobs`` by name."""
    kernel, which = _NAMES[type(knobs)]
    config: dict[str, Any] = {"kernel": kernel}
    if which:
        config["variant"] = which
    return config | {"knobs": _values(knobs)}


def _values(knobs: Any) -> dict[str, Any]:
    """All fields by name, in declaration order; nested ones nested, absent ones None."""
    values = {field.name: getattr(knobs, field.name) for field in fields(knobs)}
    return {
        name: _values(value) if is_dataclass(value) else value for name, value in values.items()
    }


def decode(config: Mapping[str, Any]) -> Knobs:
    """Rebuild knobs from :func:`encode`; old names are read as what they are now.

    Raises:
        TypeError: the kernel is unknown, or a field is unknown or missing.
        ValueError: the knobs contradict each other.
    """
    kernel, which = config.get("kernel"), config.get("variant", "")
    kinds = _KINDS.get(kernel) if isinstance(kernel, str) else None
    if kinds is None or which not in kinds:
        raise TypeError(f"no knobs are known for kernel {kernel!r}{which and f', {which}'}")
    decoded: Knobs = _built(kinds[which], reworded(config["knobs"], renamed(str(kernel))))
    return decoded


def _built(kind: Any, values: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    return kind(
        **{
            name: _built(_class_of(hints[name]), value)
            if isinstance(value, Mapping) and name in hints
            else value
            for name, value in values.items()
        }
    )


def _class_of(hint: Any) -> type[Any]:
    """The knob class of a field that may be None."""
    inner = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kind = next((inner_hint for inner_hint in inner if is_dataclass(inner_hint)), None)
    if not isinstance(kind, type):
        raise TypeError(f"nested values where {hint} is expected")
    return kind


def reworded(value: Any, words: Mapping[str, str]) -> Any:
    """A JSON value with names of fields and words replaced, at any depth."""
    if not words:
        return value
    if isinstance(value, Mapping):
        return {words.get(name, name): reworded(inner, words) for name, inner in value.items()}
    if isinstance(value, list):
        return [reworded(inner, words) for inner in value]
    return words.get(value, value) if isinstance(value, str) else value


_OLD_FORWARD_RETENTION = {"rows": "parallel", "output": "chunkwise", "warps": "recurrent"}
_OLD: dict[tuple[str, str, str], tuple[str, str]] = {
    ("attention", "forward", "sm80"): ("scores_forward_sm80", "scores"),
    ("attention", "backward", "sm80"): ("scores_backward_sm80", ""),
    ("retnet", "forward", "sm80"): ("scores_forward_sm80", "scores"),
    ("retnet", "forward", "sm90"): ("scores_forward_sm90", ""),
    ("retnet", "backward", "sm80"): ("scores_backward_sm80", ""),
    ("retnet", "backward", "sm90"): ("scores_backward_sm90", ""),
    ("retention", "parallel", "sm80"): ("scores_forward_sm80", "parallel"),
    ("retention", "chunkwise", "sm80"): ("chunks_sm80", "forward"),
    ("retention", "recurrent", "sm80"): ("recurrent_sm80", ""),
    ("retention", "forward", "sm90"): ("chunks_sm90", ""),
    ("retention", "backward", "sm80"): ("chunks_sm80", "backward"),
}


def with_kernel(config: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's config from before kernels had names, with its kernel; any other as it is.

    Configs of then have no form: of retention's, which are a closed list, each had a field that the others lack.

    Raises:
        TypeError: nothing was ever written for such an operation.
    """
    if "kernel" in config:
        return dict(config)
    op, direction, family = config.get("op"), config.get("direction"), config.get("family")
    if (op, direction, family) == ("retention", "forward", "sm80"):
        knobs = config.get("knobs", {})
        forms = [form for name, form in _OLD_FORWARD_RETENTION.items() if name in knobs]
        direction = forms[0] if forms else direction
    known = _OLD.get((str(op), str(direction), str(family)))
    if known is None:
        raise TypeError(f"no knobs are known for {op} {direction}")
    # Records of attention may be older than masks are.
    return {
        "mask": "none",
        **config,
        "kernel": known[0],
        **({"variant": known[1]} if known[1] else {}),
    }
