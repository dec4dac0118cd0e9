"""A call of ``flash_attn_func`` and of its gradient on real input, held against the reference."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..core.problem import Problem
from ..settings import override
from ..tuning.result import finite
from ..tuning.step import problems_of_step

SEED = 1


@dataclass(frozen=True, kw_only=True)
class Served:
    """One tensor that a call gave.

    Attributes:
        name: ``o``, or ``dq``, ``dk``, ``dv`` of the gradients.
        shape: of the tensor.
        ok: whether it agrees with the reference.
        reason: why not, or empty.
        max_error, max_allowed: largest absolute error, and the most that the rule allows.
    """

    name: str
    shape: tuple[int, ...]
    ok: bool
    reason: str
    max_error: float
    max_allowed: float

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields."""
        errors = {"max_error": finite(self.max_error), "max_allowed": finite(self.max_allowed)}
        return asdict(self) | {"shape": list(self.shape)} | errors


def serve(problem: Problem, device: str | None = None) -> tuple[Served, ...]:
    """Call ``flash_attn_func`` on fresh input, then its gradient through autograd, and check both.

    The output is compared whole. The gradients are, for the last sequence and the last K/V head with the query heads
    that read it, since the rounding that the rule allows is known from autograd only, which keeps every score; the rest
    must be finite.

    Args:
        problem: of either direction.
        device: the current CUDA device by default.

    Returns:
        Nothing for a problem that is none of ``flash_attn_func``'s.
    """
    if problem.score != "softmax":
        return ()
    from .. import reference
    from ..api import flash_attn_func
    from ..operations.bindings import make_inputs, ways_of
    from ..operations.shared.tensors import Inputs

    forward, backward = problems_of_step(problem)
    inputs = make_inputs(backward, seed=SEED, device=device)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    with override(strict_kernels=q.is_cuda):  # kernels are what is to be checked
        output = flash_attn_func(
            q,
            k,
            v,
            causal=problem.causal,
            causal_alignment=problem.causal_alignment,
            deterministic=backward.deterministic or None,
        )
        output.backward(inputs.tensors["dout"])
    _, o_ref, o_low = next(ways_of(forward)[0].references(forward, inputs))
    of_forward = reference.Bands.of(forward, "o", o_ref.dim())
    checks = {"o": reference.check(output.detach(), o_ref, o_low, of_forward)}
    group = problem.heads_q // problem.heads_kv
    part = replace(backward, batch=1, heads_q=group, heads_kv=1)
    heads = {"k": 1, "v": 1, "dk": 1, "dv": 1}  # of the others, as many as the group has
    last = Inputs(
        tensors={
            name: tensor[-1:, -heads.get(name, group) :] for name, tensor in inputs.tensors.items()
        }
    )
    gradients = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    for name, ref, low in ways_of(part)[0].references(part, last):
        whole = gradients[name]
        if whole is None or not bool(whole.isfinite().all()):
            checks[name] = reference.Comparison(reason="missing, or not finite everywhere")
        else:
            read = whole[-1:, -heads.get(name, group) :]
            bands = reference.Bands.of(part, name, ref.dim())
            checks[name] = reference.check(read, ref, low, bands)
    shapes = {"o": output.shape, "dq": q.shape, "dk": k.shape, "dv": v.shape}
    judged = ("ok", "reason", "max_error", "max_allowed")
    return tuple(
        Served(name=name, shape=tuple(shapes[name]), **{x: getattr(check, x) for x in judged})
        for name, check in checks.items()
    )
