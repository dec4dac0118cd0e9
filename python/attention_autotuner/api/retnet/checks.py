"""Argument checks of ``retnet_attn_func`` beyond attention's own, and the problem that its tensors name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core.operation import require
from ...core.problem import Problem
from ...errors import UnsupportedProblemError
from ...operations.retnet.reference import Normaliser
from ..shared import checks, gammas, interop, options
from ..shared.gammas import Decay


class Rules(NamedTuple):
    """The options that take scores to the factors of v.

    Attributes:
        scale: the factor of q k^T.
        causal: the promise that the mask is 0 above the diagonal; True for a decay.
        normalize: whether rows are divided by r.
        r_clamp_max: the most that r may be; None for no limit.
        r_grad: whether gradients flow through r.
    """

    scale: float
    causal: bool
    normalize: bool
    r_clamp_max: float | None
    r_grad: bool


class Forward(NamedTuple):
    """Arguments of the forward op; ``r_grad`` and ``deterministic`` are for its gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    log2_gamma: torch.Tensor | None
    gamma: tuple[float, ...] | None
    scale: float
    causal: bool
    normalize: bool
    r_clamp_max: float | None
    r_grad: bool
    device_type: str
    return_r: bool
    deterministic: bool


class Backward(NamedTuple):
    """Arguments of the backward op."""

    grad_o: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    log2_gamma: torch.Tensor | None
    gamma: tuple[float, ...] | None
    o: torch.Tensor | None
    r: torch.Tensor | None
    scale: float
    causal: bool
    normalize: bool
    r_clamp_max: float | None
    r_grad: bool
    device_type: str
    need_dmask: bool
    deterministic: bool


Call = Forward | Backward


def rules_of(call: Call) -> Rules:
    """The rules among a call's arguments."""
    return Rules(call.scale, call.causal, call.normalize, call.r_clamp_max, call.r_grad)


def check_types(rules: Rules, return_r: object) -> Rules:
    """Check the arguments that are no tensors.

    Returns:
        The rules with their numbers as floats.

    Raises:
        UnsupportedProblemError: one is outside its range, or they contradict each other.
    """
    switches = {"causal": rules.causal, "normalize": rules.normalize, "r_grad": rules.r_grad}
    checks.check_flags(**switches, return_r=return_r)
    clamp = rules.r_clamp_max
    rules = rules._replace(
        scale=options.as_float("scale", rules.scale),
        r_clamp_max=None if clamp is None else options.as_float("r_clamp_max", clamp, " or None"),
    )
    check_rules(rules)
    return rules


def check_mask_type(mask: object) -> None:
    """Check that a mask is an array of some library; its shape and dtype are for later.

    Raises:
        UnsupportedProblemError: it is something else, e.g. the name of a mask or the class of decays.
    """
    if not interop.is_array(mask) or isinstance(mask, type):
        hint = f": pass an instance, {Decay.__name__}()" if mask is Decay else ""
        raise UnsupportedProblemError(
            f"mask must be a tensor or a Decay, got {checks.shown(mask)}{hint}"
        )


def check_rules(rules: Rules) -> None:
    """Check numbers of the right types.

    Raises:
        UnsupportedProblemError: the scale is not finite, or the arguments of r contradict each other.
    """
    checks.check_scale(rules.scale, "scale")
    if rules.r_clamp_max is not None or rules.r_grad:
        Normaliser(normalize=rules.normalize, r_clamp_max=rules.r_clamp_max, r_grad=rules.r_grad)


def check_call(call: Call) -> None:
    """Check everything that a call computes with; batch, heads and sequences may be empty.

    Raises:
        UnsupportedProblemError: it names no retention that can be computed here.
    """
    q, k, mask = call.q, call.k, call.mask
    field = "decay" if mask is None else "explicit"
    checks.check_tensors(q, k, call.v, op="retnet", mask=field, causal=True)
    check_rules(rules_of(call))
    if mask is None:
        gammas.check_log2(call.log2_gamma, q)
        gammas.check(call.gamma, q.shape[1])
        return
    check_mask(mask, q, k)


def check_mask(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    """Check a mask against checked q and k.

    Raises:
        UnsupportedProblemError: its shape, dtype, device or layout is another.
    """
    checks.check_layout("mask", mask)
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    require(
        mask.dim() == 3
        and mask.shape[1] == rows
        and mask.shape[2] == keys
        and (mask.shape[0] == heads or mask.shape[0] == 1),
        f"mask must be [{heads} or 1, {rows}, {keys}], got {list(mask.shape)}",
    )
    require(mask.dtype == q.dtype, f"mask must have q's dtype {q.dtype}, got {mask.dtype}")
    require(mask.device == q.device, f"mask must be on q's device {q.device}, got {mask.device}")
    require(
        mask.shape[2] == 1 or mask.stride(2) == 1 or mask.numel() == 0,
        f"mask must have unit stride in its last dim, got {mask.stride(2)}",
    )


def check_gradients(call: Backward) -> None:
    """Check the backward's tensors beside those of the forward; strides are free.

    Raises:
        UnsupportedProblemError: one is missing, is not what the forward returned, or is no gradient of that.
    """
    o, r = call.o, call.r
    require(
        (r is not None) == call.normalize,
        f"r must be given where rows were divided by it, and nowhere else, got {checks.shown(r)}",
    )
    require(
        (o is not None) == call.r_grad,
        f"o must be given for gradients through r, and for no others, got {checks.shown(o)}",
    )
    checks.check_results({"the gradient of o": call.grad_o, "o": o}, call.q, call.v)
    checks.check_results({"r": r}, call.q)


def make_problem(call: Call, **backward: Any) -> Problem | None:
    """The problem of a checked call, None of an empty one; ``backward`` has what its backward says beside."""
    q, k, v, mask = call.q, call.k, call.v, call.mask
    if checks.is_empty(q, k):
        return None
    read = (q, k, v) if mask is None else (q, k, v, mask)
    return Problem(
        op="retnet",
        mask="decay" if mask is None else "explicit",
        causal=call.causal or mask is None,
        alignment_bytes=checks.alignment_bytes(*read),
        **checks.sizes(q, k, v),
        **backward,
    )
