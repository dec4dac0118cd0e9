"""Arguments and results of tunable functions: copies of them, the way to another process, and their comparison."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..errors import UnsupportedArgumentError

# Units in the last place that are allowed at the largest magnitude, of dtypes of up to so many bits.
SMALL_BITS, SMALL_ULPS, ULPS = 16, 2, 128


def leaves(value: Any) -> list[Any]:
    """The leaves of a nested value, of modules their parameters and buffers."""
    flat = []
    for leaf in pytree.tree_leaves(value):
        is_module = isinstance(leaf, torch.nn.Module)
        flat += [*leaf.parameters(), *leaf.buffers()] if is_module else [leaf]
    return flat


def copied(leaf: Any) -> Any:
    """A copy of a tensor, an array or a module, in the same layout; anything else as it is."""
    if isinstance(leaf, torch.nn.Module):
        return copy.deepcopy(leaf)
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, np.ndarray):
        flips = _flips(leaf)
        return leaf[flips].copy(order="K")[flips]
    return leaf


def snapshot(value: Any) -> Any:
    """A copy of what a call returned or wrote, with a list of parameters and buffers in place of each module."""

    def taken(leaf: Any) -> Any:
        return (
            [copied(x) for x in leaves(leaf)] if isinstance(leaf, torch.nn.Module) else copied(leaf)
        )

    return pytree.tree_map(taken, value)


def write(name: str, target: Any, source: Any) -> None:
    """Overwrite an argument in place, with zeros where the source is None.

    Raises:
        UnsupportedArgumentError: it is neither a tensor nor an array.
    """
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.zero_() if source is None else target.copy_(source)
    elif isinstance(target, np.ndarray):
        target[...] = 0 if source is None else source
    else:
        raise UnsupportedArgumentError(
            f"{name} is a {type(target).__name__}: only tensors, arrays and modules are reset or restored"
        )


# --- arrays ---------------------------------------------------------------------------------------


def order_of(strides: Sequence[int]) -> list[int]:
    """The axes from the largest stride to the smallest."""
    return sorted(range(len(strides)), key=lambda axis: (-abs(strides[axis]), axis))


def _flips(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """An index that makes all strides of an array positive, or what they were again."""
    return (..., *(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides))


class PickledArray:
    """An array whose pickle keeps the layout, of which NumPy itself keeps C and Fortran order alone."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __reduce__(self) -> Any:
        axes, flips = order_of(self._array.strides), _flips(self._array)
        dense = self._array[flips].transpose(axes).copy(order="C")
        return _laid_out, (dense, [axes.index(axis) for axis in range(len(axes))], flips)


def _laid_out(
    dense: np.ndarray[Any, Any], axes: Sequence[int], flips: tuple[Any, ...]
) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = dense.transpose(axes)[flips]
    return array


def crossing(arguments: dict[str, Any]) -> Any:
    """Arguments for another process to read, whose arrays keep their layouts."""
    return pytree.tree_map(
        lambda leaf: PickledArray(leaf) if isinstance(leaf, np.ndarray) else leaf, arguments
    )


# --- comparison -----------------------------------------------------------------------------------


def narrowed(reference: Any, typical: Any) -> Any:
    """A reference's results, rounded where they have a wider floating-point dtype than those of a configuration."""
    exact, spec = pytree.tree_flatten(reference)
    narrow, same = pytree.tree_flatten(typical)
    if spec != same:
        return reference
    return pytree.tree_unflatten(list(map(_rounded, exact, narrow)), spec)


def _rounded(exact: Any, narrow: Any) -> Any:
    if isinstance(exact, torch.Tensor) and isinstance(narrow, torch.Tensor):
        kinds = (exact.is_floating_point(), exact.is_complex())
        if any(kinds) and kinds == (narrow.is_floating_point(), narrow.is_complex()):
            is_wider = exact.element_size() > narrow.element_size()
            return exact.to(narrow.dtype) if is_wider else exact
    for kind in (np.ndarray, np.generic):
        if isinstance(exact, kind) and isinstance(narrow, kind):
            real = exact.dtype.kind in "fc" and exact.dtype.kind == narrow.dtype.kind
            is_wider = exact.dtype.itemsize > narrow.dtype.itemsize
            return exact.astype(narrow.dtype) if real and is_wider else exact
    return exact


def compare(
    results: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float | None
) -> str:
    """Why results are not those expected; empty where they are.

    Objects without a comparison of their own, or whose ``==`` gives no boolean, count by type.
    """
    for name, right in expected.items():
        for at, reason in _differences(results[name], right, tolerance, name):
            return f"result {at}: {reason}"
    return ""


def _differences(
    out: Any, right: Any, tolerance: float | None, at: str
) -> Iterator[tuple[str, str]]:
    """Places that differ, and why."""
    family = next((k for k in (torch.Tensor, np.ndarray) if isinstance(right, k)), None)
    if not (type(out) is type(right) if family is None else isinstance(out, family)):
        yield at, f"it is a {type(out).__name__}, a {type(right).__name__} is expected"
        return
    items: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(right, Mapping):
        if out.keys() != right.keys():
            yield at, f"it has the keys {list(out)}, {list(right)} are expected"
            return
        items = [(key, out[key], right[key]) for key in right]
    elif isinstance(right, (np.ndarray, np.generic)) and _form(out) != _form(right):
        yield at, f"it is {_form(out)}, {_form(right)} is expected"
    elif isinstance(right, (list, tuple)) or _has_items(right):
        if len(out) != len(right):
            yield at, f"it has {len(out)} items, {len(right)} are expected"
            return
        items = zip(range(len(right)), out, right, strict=True)
    elif reason := _difference(out, right, tolerance):
        yield at, reason
    for part, mine, theirs in items:
        yield from _differences(mine, theirs, tolerance, f"{at}[{part!r}]")


def _form(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}"


def _has_items(value: Any) -> bool:
    """True for tensors and arrays whose items are compared as what they are."""
    if isinstance(value, torch.Tensor):
        return value.is_nested
    return isinstance(value, np.ndarray) and value.dtype.kind == "O" and value.ndim > 0


def _difference(out: Any, right: Any, tolerance: float | None) -> str:
    try:
        if isinstance(right, torch.Tensor):
            _check_tensors(out, right, tolerance)
            return ""
        if isinstance(right, (np.ndarray, np.generic, float, complex)):
            _check_arrays(out, right, tolerance)
            return ""
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
        return " ".join(str(error).split())
    if getattr(type(right), "__eq__", None) is object.__eq__:
        return ""
    try:
        equal = out == right or (out != out and right != right)  # as NaN is
    except Exception:  # noqa: BLE001  # whatever it does, it is no comparison
        return ""
    is_unequal = isinstance(equal, (bool, np.bool_)) and not equal
    return f"it is {reprlib.repr(out)}, {reprlib.repr(right)} is expected" if is_unequal else ""


def _check_tensors(out: torch.Tensor, right: torch.Tensor, tolerance: float | None) -> None:
    atol = 0.0
    if right.is_floating_point() or right.is_complex():
        info = torch.finfo(right.dtype)
        if info.bits == 8 and out.dtype == right.dtype:  # of which torch compares bits alone
            out, right = out.float(), right.float()
        values = right if right.layout == torch.strided else right.to_dense()
        finite = values.abs()[values.isfinite()]
        atol = _share(info.bits, info.eps, tolerance)
        atol *= float(finite.max()) if finite.numel() else 0.0
    torch.testing.assert_close(out, right, rtol=0.0, atol=atol, equal_nan=True, check_device=False)


def _check_arrays(out: Any, right: Any, tolerance: float | None) -> None:
    """Check NumPy arrays and scalars, and numbers of Python, which may be of any precision: as float32."""
    values = np.asarray(right)
    if values.dtype.kind not in "fc":
        np.testing.assert_array_equal(out, right)
        return
    info = np.finfo(values.dtype if isinstance(right, (np.ndarray, np.generic)) else np.float32)
    with np.errstate(all="ignore"):
        magnitudes = np.abs(values[np.isfinite(values)])
        largest = float(magnitudes.max()) if magnitudes.size else 0.0
        atol = _share(info.bits, float(info.eps), tolerance) * largest
        np.testing.assert_allclose(out, right, rtol=0.0, atol=atol, equal_nan=True)


def _share(bits: int, eps: float, tolerance: float | None) -> float:
    """The difference that is allowed, over the largest magnitude."""
    if tolerance is not None:
        return tolerance
    return (SMALL_ULPS if bits <= SMALL_BITS else ULPS) * eps
