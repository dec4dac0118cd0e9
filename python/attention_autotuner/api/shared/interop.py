"""Arrays of other libraries, in and out through DLPack: shared memory, no copy, streams ordered by the protocol."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from ...errors import UnsupportedProblemError


def is_array(value: object) -> bool:
    """Whether a value offers its memory through DLPack."""
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def to_torch(name: str, array: Any) -> torch.Tensor:
    """View an array as a tensor; work queued for it on its library's stream comes first on torch's.

    Raises:
        UnsupportedProblemError: it is no array, or cannot be shared.
    """
    if not is_array(array):
        raise UnsupportedProblemError(
            f"{name} must be a torch tensor or an array that offers __dlpack__, got {type(array).__name__}"
        )
    try:
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedProblemError(
            f"{name} ({type(array).__name__}) cannot be read through DLPack: {error}"
        ) from error
    return tensor


def importer(like: Any) -> Callable[[torch.Tensor], Any]:
    """The ``from_dlpack`` of an array's own library.

    Raises:
        UnsupportedProblemError: that library has none.
    """
    if hasattr(like, "__array_namespace__"):
        namespace = like.__array_namespace__()
    else:
        namespace = sys.modules[type(like).__module__.partition(".")[0]]
    function: Callable[[torch.Tensor], Any] | None = getattr(namespace, "from_dlpack", None)
    if function is None:
        raise UnsupportedProblemError(
            f"{type(like).__name__} cannot be given back: {namespace.__name__} has no from_dlpack"
        )
    return function


def all_to_torch(
    **arrays: Any,
) -> tuple[dict[str, torch.Tensor], Callable[[torch.Tensor], Any]]:
    """View arrays as tensors, by their names; and what makes results arrays of the first one's library.

    Raises:
        UnsupportedProblemError: some are tensors, one is no array, or one cannot be shared.
    """
    *most, last = arrays
    if any(isinstance(array, torch.Tensor) for array in arrays.values()):
        kinds = ", ".join(type(array).__name__ for array in arrays.values())
        raise UnsupportedProblemError(
            f"{', '.join(most)} and {last} must be arrays of one library, got {kinds}"
        )
    tensors = {name: to_torch(name, array) for name, array in arrays.items()}
    return tensors, importer(next(iter(arrays.values())))
