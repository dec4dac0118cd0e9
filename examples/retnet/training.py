"""Training a small RetNet, and a comparison of its forms of retention."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..shared.data import Batches
from ..shared.script import Progress
from ..shared.training import Schedule
from .model import RetNet, TextState
from .references import exact, rounded

FORMS = ("parallel", "chunkwise", "recurrent")
STEPWISE = "token by token"
FACTOR = 2.0
"""How many times the rounded reference's error a form's may be."""
FLOOR = 2e-4
"""Relative error that is always excused."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Schedule):
    """The optimizer's settings, the dtype of matrix products and retention (parameters are fp32), and the form."""

    learning_rate: float = 1e-3
    dtype: torch.dtype = torch.bfloat16
    form: str = "auto"


def train(model: RetNet, config: TrainingConfig, batches: Batches) -> list[float]:
    """Train a model, one step a batch; returns the losses, nats a token."""
    optimizer, progress = config.optimizer(model), Progress(len(batches))
    losses = []
    for step in range(len(batches)):
        loss = loss_of(model, batches[step], config)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        config.update(optimizer, step, len(batches))
        losses.append(loss.detach())
        progress(step)
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
    """Errors of logits against those of the model in fp32, by the way they were computed, and the largest allowed."""

    errors: dict[str, float]
    allowed: float

    @property
    def ok(self) -> bool:
        """True when all are within what rounding excuses; NaN never is."""
        return all(error <= self.allowed for error in self.errors.values())


@torch.no_grad()
def compare_forms(model: RetNet, tokens: torch.Tensor, dtype: torch.dtype) -> Agreement:
    """Compare logits of one text in every form, at once and token by token with carried states, with those in fp32.

    Args:
        model: a RetNet that uses ``retention_func``.
        tokens: int64 ``[batch, seqlen]``.
        dtype: of matrix products and retention.
    """
    other = copy.deepcopy(model)
    other.use(exact)
    reference = other(tokens)
    other.use(rounded)
    with torch.autocast(tokens.device.type, dtype):
        rounding = error_of(other(tokens), reference)
        logits = {form: model(tokens, form=form) for form in FORMS}
        logits[STEPWISE] = logits_by_step(model, tokens)
    errors = {name: error_of(ours, reference) for name, ours in logits.items()}
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


def error_of(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, of each token's logits, on average over the tokens.

    Not one norm of all: where a first token's query is nearly orthogonal to its key, rounding decides the sign of what
    the norm of the heads makes of it, and one such token would outweigh thousands.
    """
    return float(((logits - reference).norm(dim=-1) / reference.norm(dim=-1)).mean())
