"""The ``torch.library`` that the ops of every operation are defined in.

``Library.define`` and ``impl`` rather than ``custom_op``: a third of its host time a call.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = "attention_autotuner"

# Lives as long as the module: the ops vanish with it.
LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # torch's own


def define(schema: str, *, cuda: Any, cpu: Any, fake: Any) -> Any:
    """Add an op to the library.

    Args:
        schema: in torch's own notation.
        cuda: what computes it on a GPU.
        cpu: what computes it on the CPU.
        fake: what makes outputs of the right shape, layout, dtype and device, and refuses bad arguments.

    Returns:
        The op, to be called.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, cuda, "CUDA")
    LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.attention_autotuner, name).default


def differentiate_by(op: Any, formula: Any, *, setup_context: Any) -> None:
    """Give an op a derivative, as ``torch.library.register_autograd`` has it."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{op._opname}", formula, setup_context=setup_context, lib=LIBRARY
    )
