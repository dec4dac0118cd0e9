"""Second derivatives by the PyTorch reference, for ops whose backward has no formula of its own derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .plain import Gradient, notice

Tensors = Sequence[Gradient]

_vjp: Any = torch.func.vjp  # whose results are as many as its arguments ask for


def notice_reference(op: str, q: torch.Tensor) -> None:
    """Log, once a process, that second derivatives of tensors on a GPU come from the reference."""
    if q.is_cuda:
        notice(
            f"second derivatives of {op} have no kernel: they are computed by the PyTorch reference, which is exact "
            "but slow"
        )


def zeros_like(tensors: Tensors) -> tuple[Gradient, ...]:
    """Zeros for every tensor, None for every None."""
    return tuple(None if x is None else torch.zeros_like(x) for x in tensors)


def differentiate_again(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Tensors,
    gradients: Tensors,
    directions: Tensors,
) -> tuple[list[Gradient], list[Gradient]]:
    """Gradients of a loss of an op's gradients by the tensors that those were computed from.

    Where gradients are being recorded the result can be differentiated further.

    Args:
        function: the op by differentiable steps, of all inputs, in fp32.
        inputs: of the op; None for absent ones.
        gradients: of the op's outputs; None for none.
        directions: gradients of the loss by the op's gradients, one for each input; None for those not computed.

    Returns:
        Gradients of the loss by the inputs and by the outputs' gradients, None where those are.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _by_transforms(function, inputs, gradients, directions)
    further = torch.is_grad_enabled()

    def in_fp32(x: torch.Tensor | None) -> torch.Tensor | None:
        """In fp32 and differentiable: by what came before x as well, if anybody may ask."""
        if x is None:
            return None
        if further and x.requires_grad:
            # Never x itself: the outputs' gradients may depend on it too, and that is not for us to count.
            return x.view_as(x).float()
        return x.detach().float().requires_grad_()

    leaves, by_outputs = [in_fp32(x) for x in inputs], [in_fp32(x) for x in gradients]
    with torch.enable_grad():
        outputs = function(*leaves)
        # The outputs of an empty sequence hang on nothing, but for its state.
        pairs = [
            (o, g)
            for o, g in zip(outputs, by_outputs, strict=True)
            if g is not None and o.requires_grad
        ]
        wanted = [
            (leaf, d)
            for leaf, d in zip(leaves, directions, strict=True)
            if leaf is not None and d is not None
        ]
        first = torch.autograd.grad(
            [o for o, _ in pairs],
            [leaf for leaf, _ in wanted],
            [g for _, g in pairs],
            create_graph=True,
            materialize_grads=True,
        )
        # A gradient that is zero whatever the inputs are hangs on nothing.
        moving = [
            (x, d.float()) for x, (_, d) in zip(first, wanted, strict=True) if x.requires_grad
        ]
        second = iter(
            torch.autograd.grad(
                [x for x, _ in moving],
                [x for x in (*leaves, *by_outputs) if x is not None],
                [d for _, d in moving],
                create_graph=further,
                materialize_grads=True,
            )
        )
    by_inputs, by_gradients = (
        [None if x is None else next(second).to(x.dtype) for x in group]
        for group in (inputs, gradients)
    )
    return by_inputs, by_gradients


def _by_transforms(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Tensors,
    gradients: Tensors,
    directions: Tensors,
) -> tuple[list[Gradient], list[Gradient]]:
    """The same inside of torch.func's transforms, which refuse leaves."""
    tensors = (*inputs, *gradients)
    places = [place for place, x in enumerate(tensors) if x is not None]

    def whole(present: Sequence[torch.Tensor]) -> list[Gradient]:
        """Values of the tensors that are there, and None in the place of others."""
        values = dict(zip(places, present, strict=False))
        return [values.get(place) for place in range(len(tensors))]

    def first(*present: torch.Tensor) -> tuple[torch.Tensor, ...]:
        of_inputs, by_outputs = present[:count], whole(present)[len(inputs) :]
        outputs, pull = _vjp(
            lambda *values: tuple(function(*whole(values)[: len(inputs)])), *of_inputs
        )
        pairs = zip(by_outputs, outputs, strict=True)
        results = whole(pull(tuple(torch.zeros_like(o) if g is None else g for g, o in pairs)))
        pairs_of_inputs = zip(results, directions, strict=False)
        return tuple(x for x, d in pairs_of_inputs if x is not None and d is not None)

    count = sum(place < len(inputs) for place in places)
    _, pull = _vjp(first, *(x.float() for x in tensors if x is not None))
    pairs = zip(inputs, directions, strict=True)
    second = whole(pull(tuple(d.float() for x, d in pairs if x is not None and d is not None)))
    results = [
        None if x is None or y is None else y.to(x.dtype)
        for x, y in zip(tensors, second, strict=True)
    ]
    return results[: len(inputs)], results[len(inputs) :]
