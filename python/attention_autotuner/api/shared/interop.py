"""Arrays of other libraries, in and out through DLPack: shared memory, no copy, streams ordered by the protocol."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from ...errors import UnsupportedProblemError


def is_array(value: object) -> bool:
    """Return True for a value that offers its memory through DLPack."""
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def to_torch(name: str, array: Any) -> torch.Tensor:
    """View an array as a tensor; work queued for it on its library's stream comes first on torch's.

    Raises:
        UnsupportedProblemError: it is no array, or cannot be shared.
    """
    if not is_array(array) or isinstance(array, type):
        raise UnsupportedProblemError(
            f"{name} must be a torch tensor or an array that offers __dlpack__, got {type(array).__name__}"
        )
    strides = getattr(array, "strides", None)
    if isinstance(strides, tuple) and any(stride < 0 for stride in strides):
        # Torch has none of those, and its import of them ends the process instead of raising.
        raise UnsupportedProblemError(
            f"{name} must have no negative stride, got strides of {strides} bytes: make it contiguous first"
        )
    try:
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedProblemError(
            f"{name} ({type(array).__name__}) cannot be read through DLPack: {error}"
        ) from error
    return tensor


def check_writable(name: str, array: Any) -> None:
    """Check that an array of another library may be written to.

    Raises:
        UnsupportedProblemError: it is marked as read-only, as the memory behind it may be.
    """
    interface = getattr(array, "__array_interface__", None)
    if interface is not None and interface["data"] is not None and interface["data"][1]:
        raise UnsupportedProblemError(
            f"{name} must be writable to be updated in place, got a read-only {type(array).__name__}"
        )


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


def call_with_tensors(function: Callable[..., Any], arrays: dict[str, Any], **options: Any) -> Any:
    """Call a function with views of arrays as tensors, and return its tensors as arrays of the first one's library.

    Args:
        function: to be called.
        arrays: its arguments that are arrays, by their names.
        options: its other arguments.

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
    give_back = importer(next(iter(arrays.values())))
    results = function(**tensors, **options)
    if isinstance(results, tuple):
        return tuple(None if x is None else give_back(x) for x in results)
    return give_back(results)
