"""Training a small RetNet, and judging what it computes in each form of retention."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..gpt.data import Batches
from .model import RetNet, TextState
from .references import exact, rounded

FORMS = ("parallel", "chunkwise", "recurrent")
STEPWISE, ROUNDING = "token by token", "reference, rounded"
FACTOR = 2.0
"""How many times the rounded reference's error a form's may be."""
FLOOR = 2e-4
"""Relative error that is always excused."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train.

    Attributes:
        learning_rate: at its peak; it rises over ``warmup_steps`` and falls along a cosine to a tenth.
        warmup_steps: steps until the peak.
        weight_decay: of AdamW, on matrices only.
        clip: largest norm of all gradients together.
        dtype: of matrix products and retention; weights are fp32.
        form: of retention.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    form: str = "auto"

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of one step of many."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(model: RetNet, config: TrainingConfig, batches: Batches) -> list[float]:
    """Train a model, one step a batch; answers the losses, nats a token."""
    parameters = list(model.parameters())
    groups = [
        {"params": [x for x in parameters if x.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [x for x in parameters if x.dim() != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step in range(len(batches)):
        loss = loss_of(model, batches[step], config)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step, len(batches))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def loss_of(
    model: RetNet, batch: tuple[torch.Tensor, torch.Tensor], config: TrainingConfig
) -> torch.Tensor:
    """The mean cross-entropy of the next token, nats a token."""
    tokens, targets = batch
    with torch.autocast(tokens.device.type, config.dtype):
        logits = model(tokens, form=config.form)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: RetNet, batches: Batches, config: TrainingConfig) -> float:
    """Mean loss over batches, without training on them."""
    losses = [loss_of(model, batches[index], config) for index in range(len(batches))]
    return float(torch.stack(losses).mean())


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far logits are from those of the model in fp32, by the way they were computed.

    Attributes:
        errors: as :func:`error_of`.
        allowed: the most that any may be.
    """

    errors: dict[str, float]
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether all are within what rounding excuses; NaN never is."""
        return all(error <= self.allowed for error in self.errors.values())


@torch.no_grad()
def judge_forms(model: RetNet, tokens: torch.Tensor, dtype: torch.dtype) -> Agreement:
    """Logits of one text in every form, at once and token by token with carried states, against fp32.

    Args:
        model: a RetNet that uses ``retention_func``.
        tokens: int64 ``[batch, seqlen]``.
        dtype: of matrix products and retention.
    """
    other = copy.deepcopy(model)
    other.use(exact)
    with _full_precision():
        truth = other(tokens)
    other.use(rounded)
    with torch.autocast(tokens.device.type, dtype):
        rounding = error_of(other(tokens), truth)
        found = {form: model(tokens, form=form) for form in FORMS}
        found[STEPWISE] = logits_by_step(model, tokens)
    errors = {name: error_of(logits, truth) for name, logits in found.items()}
    return Agreement(errors=errors, allowed=FACTOR * rounding + FLOOR)


@torch.no_grad()
def logits_by_step(model: RetNet, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a text that is read one token at a time, in one state that every step changes."""
    logits, state = model.read(tokens[:, :1], form="recurrent")
    steps = (model.step(token[:, None], state) for token in tokens[:, 1:].unbind(1))
    return torch.cat([logits, *steps], dim=1)


@torch.no_grad()
def read_prompt(
    model: RetNet, prompt: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, TextState]:
    """Read a prompt at once: the likeliest next token ``[batch, 1]``, and the state to go on from."""
    with torch.autocast(prompt.device.type, dtype):
        logits, state = model.read(prompt)
    return logits[:, -1:].argmax(-1), state


def error_of(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth, of each token's logits, on average over the tokens.

    Not one norm of all: where a first token's query is nearly orthogonal to its key, rounding decides the sign of what
    the norm of the heads makes of it, and one such token would outweigh thousands.
    """
    return float(((found - truth).norm(dim=-1) / truth.norm(dim=-1)).mean())


@contextmanager
def _full_precision() -> Iterator[None]:
    """No TF32 in the products of the truth."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
