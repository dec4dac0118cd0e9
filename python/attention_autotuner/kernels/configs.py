"""Candidates as JSON: the values that a kernel's knobs can hold, and the reading of configs in earlier forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..core.candidate import Candidate, KernelKnobs
from ..core.identity import digest16, is_later, is_later_word, stated
from ..core.problem import operations
from .registry import KERNELS

_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def knob_schema(kernel: str) -> str:
    """Digest of what the knobs of a kernel can hold: their names, those of nested ones, and the words that some take.

    A change of one kernel's knobs changes no other's.

    Raises:
        KeyError: there is no such kernel.
    """
    kind: type[KernelKnobs] = KERNELS[kernel].knobs
    return schema_of(kind)  # type: ignore[arg-type]  # a class is hashable, whatever its instances are


@cache
def schema_of(kind: type[KernelKnobs]) -> str:
    """Digest of what knobs of a class can hold; see :func:`knob_schema`."""
    return digest16("knobs", kind.kernel, list(_vocabulary(kind)))


def _vocabulary(kind: type[Any]) -> Iterator[object]:
    hints = _hints(kind)
    for field in fields(kind):
        if is_later(field):
            continue
        words = (word for word in _words(hints[field.name]) if not is_later_word(field, word))
        yield [field.name, list(words)]


def _words(hint: Any) -> Iterator[object]:
    """The values that a field can hold: words, or a nested knob class's vocabulary."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield from _vocabulary(hint)
    elif get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    else:
        for inner in get_args(hint):
            yield from _words(inner)


def candidate_from_config(config: Mapping[str, Any]) -> Candidate:
    """Rebuild a candidate from :attr:`~..core.candidate.Candidate.config`, or from what that was before.

    Raises:
        TypeError: a field is unknown or missing, or there is no such kernel.
        ValueError: the knobs contradict each other.
    """
    config = with_kernel(config)
    names = {"kernel", "family", *(f.name for f in fields(Candidate) if not is_later(f))}
    missing = names - config.keys()
    if missing:
        raise TypeError(f"a candidate's config lacks {', '.join(sorted(missing))}")
    if config["op"] not in operations():
        raise TypeError(f"no knobs are known for {config['op']} {config['direction']}")
    kernel = KERNELS.get(config["kernel"])
    if kernel is None:
        raise TypeError(f"there is no kernel {config['kernel']!r}")
    if config["family"] != kernel.family:
        raise TypeError(f"{kernel.name} is not of family {config['family']}")
    values = {name: value for name, value in config.items() if name not in ("kernel", "family")}
    knobs = _built(kernel.knobs, reworded(config["knobs"], kernel.renamed))
    return Candidate(**{**values, "knobs": knobs})


def _built(kind: Any, values: Mapping[str, Any]) -> Any:
    """Knobs, or a nested part of them, from their JSON form."""
    hints = _hints(kind)
    nested = {
        name: _built(_class_of(hints[name]), value)
        for name, value in values.items()
        if isinstance(value, Mapping) and name in hints
    }
    return kind(**{**values, **nested})


def _class_of(hint: Any) -> type[Any]:
    """The knob class of a field that may be None."""
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and is_dataclass(option):
            return option
    raise TypeError(f"nested values where {hint} is expected")


def reworded(value: Any, words: Mapping[str, str]) -> Any:
    """A JSON value with names of fields and words replaced, at any depth."""
    if not words:
        return value
    if isinstance(value, Mapping):
        return {words.get(name, name): reworded(inner, words) for name, inner in value.items()}
    if isinstance(value, list):
        return [reworded(inner, words) for inner in value]
    return words.get(value, value) if isinstance(value, str) else value


def encode(knobs: KernelKnobs) -> dict[str, Any]:
    """Knobs as JSON-ready values: ``kernel``, and ``knobs`` by name, nested ones nested and absent ones None.

    Later fields at their defaults are left out.
    """
    return {"kernel": knobs.kernel, "knobs": stated(knobs)}


RENAMED_FIELDS = {"class_qk": "padded_dim_qk", "class_v": "padded_dim_v"}
_VARIANTS = ("scores", "parallel", "forward", "backward")
# Configs from before kernels had names tell theirs by operation, direction and family; of retention forward, whose
# knobs are a closed list, by a field that each had and the others lacked.
_OLD_FORMS = {"rows": "scores_forward_sm80", "output": "chunks_sm80", "warps": "recurrent_sm80"}
_OLD: dict[tuple[str, str, str], str] = {
    ("attention", "forward", "sm80"): "scores_forward_sm80",
    ("attention", "backward", "sm80"): "scores_backward_sm80",
    ("retnet", "forward", "sm80"): "scores_forward_sm80",
    ("retnet", "forward", "sm90"): "scores_forward_sm90",
    ("retnet", "backward", "sm80"): "scores_backward_sm80",
    ("retnet", "backward", "sm90"): "scores_backward_sm90",
    ("retention", "forward", "sm90"): "chunks_sm90",
    ("retention", "backward", "sm80"): "chunks_sm80",
}


def with_kernel(config: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's config from before kernels had names, in the present form; any other as it is.

    Raises:
        TypeError: nothing was ever written for such an operation or variant.
    """
    config = {RENAMED_FIELDS.get(name, name): value for name, value in config.items()}
    if "kernel" in config:
        # Two kernels had two knob classes each for a while, and a config said of which it was.
        named = {name: value for name, value in config.items() if name != "variant"}
        if config.get("variant", _VARIANTS[0]) not in _VARIANTS:
            raise TypeError(f"{config['kernel']!r} has no variant {config['variant']!r}")
        return named | ({"knobs": _flat(config["knobs"])} if "knobs" in config else {})
    op, direction, family = config.get("op"), config.get("direction"), config.get("family")
    kernel = _OLD.get((str(op), str(direction), str(family)))
    knobs = config.get("knobs", {})
    if (op, direction, family) == ("retention", "forward", "sm80"):
        kernel = next((name for field, name in _OLD_FORMS.items() if field in knobs), None)
    if kernel is None:
        raise TypeError(f"no knobs are known for {op} {direction}")
    # Records of attention may be older than masks are.
    return {"mask": "none", **config, "kernel": kernel, "knobs": _flat(knobs)}


def _flat(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs without the nested ones that the parallel form's kernel over rows had once."""
    return {**knobs.get("rows", {}), **{n: value for n, value in knobs.items() if n != "rows"}}
