"""AdamW with a warm-up and a cosine, and initial weights, alike for all models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

INITIAL_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Settings of the optimizer.

    Attributes:
        learning_rate: at its peak; it rises over ``warmup_steps`` and falls along a cosine to a tenth.
        warmup_steps: steps until the peak.
        weight_decay: of AdamW, on matrices only.
        clip: largest norm of all gradients together.
    """

    learning_rate: float = 6e-4
    warmup_steps: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of one step of many."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over a model's parameters."""
        matrices = [x for x in model.parameters() if x.dim() == 2]
        vectors = [x for x in model.parameters() if x.dim() != 2]
        groups: list[Any] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        options: Any = {"betas": (0.9, 0.95), "weight_decay": self.weight_decay, "fused": True}
        return torch.optim.AdamW(groups, **options)

    def update(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
        """Apply the gradients of one step of many, and clear them."""
        parameters = [x for group in optimizer.param_groups for x in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate_at(step, steps)
        optimizer.step()
        optimizer.zero_grad()


def initialise(model: nn.Module, layers: int) -> None:
    """Draw all matrices; those that add to the residual stream smaller, so that its variance does not grow."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            shrink = math.sqrt(2 * layers) if name.endswith("out.weight") else 1.0
            nn.init.normal_(parameter, std=INITIAL_DEVIATION / shrink)


def turn(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs ``x[..., i]`` and ``x[..., i + dim / 2]``, by cosines and sines of angles; in fp32 at least."""
    cos, sin = rotation
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
