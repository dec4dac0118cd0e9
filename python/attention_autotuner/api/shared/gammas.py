"""The decay of every head, a number, a sequence or a tensor, as the logarithm on the device that kernels read.

Numbers are checked, their logarithms taken in fp64 and moved to a device once. A tensor on the device is used as it is:
asking for its values would make the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeVar

import torch

from ...core.memo import Table
from ...core.operation import require
from ...errors import NotWarmError
from ...operations.retention.reference import default_log2_gamma
from . import checks, interop, plain

Floats = tuple[float, ...]
Read = tuple["torch.Tensor | None", "Floats | None"]
"""The logarithms as a tensor, or the decays as numbers; neither for the usual ones."""
C = TypeVar("C", bound=Any)

MAX_KEPT = 1024
"""Groups of decays kept on devices; beyond that the oldest are dropped."""


class Decay:
    """A mask that is never written out: ``gamma^(i + seqlen_k - seqlen_q - j)``, and 0 above the diagonal.

    Attributes:
        gamma: of every head, in (0, 1]: None for ``1 - 2^(-5-h)``, a number for all heads, a sequence of numbers, or a
            tensor ``[heads_q]``.
    """

    def __init__(self, gamma: Any = None) -> None:
        self.gamma = gamma

    def __repr__(self) -> str:
        return f"Decay({self.gamma!r})"


def hashable(call: C) -> C:
    """A call of an op whose decays are no list, as the dispatcher has them; a ``NamedTuple`` with a field ``gamma``."""
    if call.gamma is None:
        return call
    replaced: C = call._replace(gamma=tuple(call.gamma))
    return replaced


def read(gamma: Any, q: torch.Tensor) -> Read:
    """Decays as ops take them.

    Args:
        gamma: as :class:`Decay` has it, or an array of another library.
        q: for the number of heads and the device.

    Returns:
        A tensor's logarithm in fp32 on the device, differentiable by gamma, or the numbers, whose range and count are
        for :func:`check`.

    Raises:
        UnsupportedProblemError: gamma is of another type, or a tensor on the CPU with a value outside (0, 1].
    """
    if gamma is None:
        return None, None
    if isinstance(gamma, (list, tuple)):
        if all(type(x) is float for x in gamma):
            return None, tuple(gamma)
        return None, tuple(_number(x, f" for head {head}") for head, x in enumerate(gamma))
    checks.check_dims("q", q)
    if type(gamma) is float:
        return None, (gamma,) * q.shape[1]
    if isinstance(gamma, torch.Tensor):
        return _read_tensor(gamma, q.shape[1], q.device)
    if interop.is_array(gamma) and not isinstance(gamma, Real):
        return _read_tensor(interop.to_torch("gamma", gamma), q.shape[1], q.device)
    return None, (_number(gamma),) * q.shape[1]


def _number(x: Any, place: str = "") -> float:
    require(
        isinstance(x, Real) and not isinstance(x, bool),
        f"gamma must be None, a number, a sequence of numbers or a tensor, got {type(x).__name__}{place}",
    )
    return checks.to_float(x)


def _read_tensor(gamma: torch.Tensor, heads: int, device: torch.device) -> Read:
    checks.check_layout("gamma", gamma)
    require(
        gamma.is_floating_point() and tuple(gamma.shape) == (heads,),
        f"gamma must be floats [{heads}], one for each head of q, got {gamma.dtype} {list(gamma.shape)}",
    )
    require(
        gamma.device == device or gamma.device.type == "cpu",
        f"gamma must be on q's device {device} or on the CPU, got {gamma.device}",
    )
    if not torch.compiler.is_compiling() and gamma.device.type == "cpu" and plain.addresses(gamma):
        values = tuple(gamma.detach().tolist())
        check(values, heads)
        if not (gamma.requires_grad and torch.is_grad_enabled()):
            return None, values
    precise = gamma if gamma.dtype == torch.float64 else gamma.float()
    return precise.log2().to(device, torch.float32), None


def check(gamma: Sequence[float] | None, heads: int) -> None:
    """Check decays that are numbers.

    Raises:
        UnsupportedProblemError: there are too few or too many, or one is not in (0, 1].
    """
    if gamma is None:
        return
    require(
        len(gamma) == heads,
        f"gamma must have one value for each of {heads} heads of q, got {len(gamma)}",
    )
    for head, value in enumerate(gamma):
        # NaN is in no range.
        require(0 < value <= 1, f"gamma must lie in (0, 1], got {value} for head {head}")


def check_log2(log2_gamma: torch.Tensor | None, q: torch.Tensor) -> None:
    """Check logarithms as kernels read them.

    Raises:
        UnsupportedProblemError: shape, dtype, device or stride is another.
    """
    if log2_gamma is None:
        return
    heads = q.shape[1]
    require(
        log2_gamma.dtype == torch.float32
        and tuple(log2_gamma.shape) == (heads,)
        and log2_gamma.is_contiguous(),
        f"log2_gamma must be contiguous float32 [{heads}], got {log2_gamma.dtype} {list(log2_gamma.shape)}",
    )
    require(
        log2_gamma.device == q.device,
        f"log2_gamma must be on q's device {q.device}, got {log2_gamma.device}",
    )


def exact_log2(gamma: Sequence[float] | None, heads: int) -> torch.Tensor:
    """The logarithms of checked numbers, or the usual ones: fp64 ``[heads]`` on the CPU, exact also next to 1."""
    if gamma is None:
        return default_log2_gamma(heads)
    # From 1/2 on the difference from 1 is exact.
    logs = [math.log1p(x - 1) / math.log(2) if x > 0.5 else math.log2(x) for x in gamma]
    return torch.tensor(logs, dtype=torch.float64, device="cpu")


def of_reference(
    log2_gamma: torch.Tensor | None, gamma: Sequence[float] | None
) -> torch.Tensor | None:
    """Decays as the reference takes them: fp64 ``[heads]``, or None for the usual ones."""
    if log2_gamma is not None:
        return log2_gamma.double().exp2()
    return None if gamma is None else torch.tensor(gamma, dtype=torch.float64, device="cpu")


ON_DEVICES: Table[tuple[Floats | int, torch.device], torch.Tensor] = Table("decays", bound=MAX_KEPT)


def on_device(gamma: Floats | None, heads: int, device: torch.device) -> torch.Tensor:
    """The logarithms of numbers, fp32 ``[heads]`` on a device, made once; the caller keeps them as long as it may.

    Raises:
        UnsupportedProblemError: the numbers are wrong.
        NotWarmError: a graph is being captured and these are not there yet.
    """
    check(gamma, heads)
    key = (heads if gamma is None else gamma, device)
    logarithms = ON_DEVICES.get(key)
    if logarithms is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotWarmError(
                "these decays have to be moved to the GPU first: call it once outside graph capture with the same gamma"
            )
        with torch.inference_mode(False):
            logarithms = exact_log2(gamma, heads).to(device, torch.float32)
        ON_DEVICES.remember(key, logarithms)
    return logarithms
