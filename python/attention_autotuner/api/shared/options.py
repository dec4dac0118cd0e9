"""Arguments as callers of flash_attn, SDPA and fla know them: layouts, off values, and numbers of other libraries."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch

from ...core.operation import require
from ...errors import UnsupportedArgumentError
from . import checks, interop

TensorLayout = Literal["bhsd", "bshd"]
LAYOUTS: tuple[str, ...] = ("bhsd", "bshd")
BHSD, BSHD = LAYOUTS
CPU_MEMORY = 1  # kDLCPU of DLPack


class Off(NamedTuple):
    """The value of an option that leaves it off, and a hint for callers who want it on."""

    value: Any = None
    hint: str = ""


MASKS = "masks here are causal, window_size, prefix_lens, document_ids and attn_mask, as far as a function has them"
COMMON = {"cu_seqlens": Off(hint="pad the batch, or call once for each sequence")}
ATTENTION: Mapping[str, Off] = {
    "block_mask": Off(hint=MASKS),
    "block_table": Off(),
    "dropout_p": Off(0.0, "apply dropout to o, or train without"),
    "enable_gqa": Off(True, "heads of q may be any multiple of heads of k and v without it"),
    "is_causal": Off(
        False,
        "SDPA's diagonal is causal=True, causal_alignment='top_left', flash_attn's causal=True",
    ),
    "return_attn_probs": Off(False, "return_lse=True returns (o, lse)"),
    "score_mod": Off(),
    **COMMON,
}
RETENTION: Mapping[str, Off] = {"head_first": Off(False, "layout says it")}
RETNET: Mapping[str, Off] = {**RETENTION, **COMMON}
"""Options of other packages' functions -> the value that leaves each off."""
SYNONYMS: Mapping[str, str] = {"softmax_scale": "scale", "scale": "softmax_scale"}
HINTS: Mapping[str, str] = {"causal": "it is causal always, leave it out"}
"""Arguments of some functions -> a hint for callers of one without it."""


def refuse_others(
    function: Callable[..., Any], others: Mapping[str, Any], off: Mapping[str, Off]
) -> None:
    """Refuse arguments that a function does not have, save options of others at the value that leaves them off.

    Raises:
        UnsupportedArgumentError: an option is not at that value, or there is no such argument.
    """
    for name, value in others.items():
        option = off.get(name)
        if option is None:
            known = inspect.signature(function).parameters
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            meant = SYNONYMS.get(name)
            if meant is not None:
                close = [meant] if meant in known else []
            hint = f"; did you mean {close[0]}?" if close else ""
            hint = f"; {HINTS[name]}" if name in HINTS else hint
            raise UnsupportedArgumentError(
                f"{function.__name__} has no argument {name!r}, got {name}={checks.shown(value)}{hint}"
            )
        plain = value is None or isinstance(value, (Real, list, tuple))
        same = tuple(value) if isinstance(value, list) else value
        if not (plain and same == option.value and (same is None) == (option.value is None)):
            raise UnsupportedArgumentError(
                f"{function.__name__} has no {name}: it must be {option.value!r}, which leaves it off, "
                f"got {checks.shown(value)}" + (f"; {option.hint}" if option.hint else "")
            )


def refuse_number(function: str, device_type: object, place: str = "fourth") -> None:
    """Refuse a number in the place of ``device_type``.

    Args:
        function: that was called.
        device_type: its argument.
        place: of the argument.

    Raises:
        UnsupportedArgumentError: it is one, as flash_attn's argument there, ``dropout_p``, is.
    """
    if isinstance(device_type, Real):
        raise UnsupportedArgumentError(
            f"device_type must be a policy, its class, its name or None, got {device_type!r}: the {place} argument "
            f"of flash_attn's function is dropout_p, that of {function} is device_type"
        )


def as_float(name: str, value: object, also: str = "") -> float:
    """A number as a float: Python's, NumPy's, or the one element of an array without dimensions on the CPU.

    Args:
        name: in messages.
        value: the number.
        also: what else the argument may be, in messages.

    Raises:
        UnsupportedProblemError: it is something else, requires a gradient, or lies on a GPU.
    """
    number: Any = value
    if isinstance(value, torch.Tensor):
        require(
            value.device.type == "cpu" and not value.requires_grad,
            f"{name} must be a number on the CPU without a gradient, got a tensor on {value.device}, "
            f"requires_grad={value.requires_grad}",
        )
        number = value.item() if value.dim() == 0 else value
    elif isinstance(value, float):
        return value  # torch.compile traces one that changes, but no question about its attributes
    elif isinstance(value, int) and not isinstance(value, bool):
        return checks.to_float(value)
    elif getattr(value, "shape", None) == () and hasattr(value, "__dlpack_device__"):
        number = number.item() if number.__dlpack_device__()[0] == CPU_MEMORY else number
    require(
        isinstance(number, Real) and not isinstance(number, bool),
        f"{name} must be a float{also}, got {type(value).__name__} {checks.shown(number)}",
    )
    return checks.to_float(number)


def is_bshd(layout: object) -> bool:
    """True for ``"bshd"``; arrays, which compare element by element, are no layout."""
    return layout is BSHD or (isinstance(layout, str) and layout == BSHD)


def call_with_views(
    function: Callable[..., Any], layout: object, tensors: dict[str, Any], **options: Any
) -> Any:
    """Call a function of ``[batch, heads, seqlen, dim]`` tensors with arrays, or in another layout; by views.

    Args:
        function: one with arguments q, k, v and ``layout``.
        layout: of q, k and v, and of the first result.
        tensors: its arguments that are tensors or arrays, by their names.
        options: its other arguments.

    Raises:
        UnsupportedProblemError: there is no such layout, or q, k or v has more or fewer than 4 dimensions.
    """
    require(
        isinstance(layout, str) and layout in LAYOUTS,
        f"layout must be one of {LAYOUTS}, got {checks.shown(layout)}",
    )
    if not all(isinstance(x, torch.Tensor) for x in tensors.values()):
        return interop.call_with_tensors(function, tensors, layout=layout, **options)
    if layout == BHSD:
        return function(**tensors, **options)
    views = {}
    for name in ("q", "k", "v"):
        checks.check_layout(name, tensors[name])
        checks.check_dims(name, tensors[name], "[batch, seqlen, heads, dim]")
        views[name] = tensors[name].transpose(1, 2)
    result = function(**(tensors | views), **options)
    if isinstance(result, tuple):
        return (result[0].transpose(1, 2), *result[1:])
    return result.transpose(1, 2)
