"""Training several models in step with each other: one seed, the same batches, steps taken in turn.

The models differ in their attention alone. Each step goes round all of them in an order drawn anew, so that none has
the clocks or the caches to itself, and their step times can be compared.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .attentions import Attention
from .data import Batches
from .model import GPT, GPTConfig

UNTIMED_STEPS = 10
"""The first steps are not timed: clocks, allocator and caches settle."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train.

    Attributes:
        learning_rate: at its peak; it rises over ``warmup_steps`` and falls along a cosine to a tenth.
        warmup_steps: steps until the peak.
        weight_decay: of AdamW, on matrices only.
        clip: largest norm of all gradients together.
        seed: of the weights, and of the order in which models take turns.
        compile_mode: a mode of ``torch.compile``, or None to run eagerly.
    """

    learning_rate: float = 6e-4
    warmup_steps: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    compile_mode: str | None = None

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of one step of many."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        fall = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        return self.learning_rate * rise * fall


@dataclass(frozen=True, kw_only=True)
class History:
    """What became of one model.

    Attributes:
        losses: of every step, nats a byte.
        held_out_loss: after training, on text that was never trained on.
        first_seconds: wall time of the first forward and backward pass, kernel builds and compilation included.
        step_ms: time of every step but the first few, milliseconds.
        peak_bytes: most memory that weights, optimizer and a step took together; None on the CPU.
    """

    losses: list[float]
    held_out_loss: float
    first_seconds: float
    step_ms: list[float]
    peak_bytes: int | None


class Trainee:
    """One model, its optimizer, and what is measured while it trains."""

    def __init__(
        self, sizes: GPTConfig, config: TrainingConfig, attention: Attention, device: torch.device
    ) -> None:
        self.config, self.device = config, device
        torch.manual_seed(config.seed)
        self.model = GPT(sizes, attention).to(device)
        self.parameters = list(self.model.parameters())
        matrices = [parameter for parameter in self.parameters if parameter.dim() == 2]
        vectors = [parameter for parameter in self.parameters if parameter.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self.model
        if config.compile_mode is not None:
            self.compute = torch.compile(self.model, fullgraph=True, mode=config.compile_mode)
        self.losses: list[torch.Tensor] = []
        self.times: list[Callable[[], float]] = []
        self.first_seconds = math.nan
        self.step_bytes = 0

    def prepare(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Go forward and back once and forget it: kernels are built and graphs compiled before anything counts."""
        start = time.perf_counter()
        self._gradients(batch)
        self.optimizer.zero_grad()
        _synchronize(self.device)
        self.first_seconds = time.perf_counter() - start

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], learning_rate: float) -> None:
        """One optimizer step; the host does not wait for the device."""
        before = self._start_memory()
        elapsed = _stopwatch(self.device)
        loss = self._gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(elapsed())
        self.losses.append(loss)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - before
            self.step_bytes = max(self.step_bytes, peak)

    def _gradients(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch's own
        # Weights stay fp32; matrix products and attention run in bf16.
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.compute(*batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        return loss.detach().clone()  # a CUDA graph would overwrite the original

    def _start_memory(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    @torch.no_grad()
    def held_out_loss(self, batches: Batches) -> float:
        """Mean loss over batches, without training on them."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            losses = [self.model(*batches[index]) for index in range(len(batches))]
        return float(torch.stack(losses).mean())

    def history(self, held_out: Batches) -> History:
        """Everything that was measured."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        kept = sum(x.numel() * x.element_size() for x in [*self.parameters, *state])
        untimed = min(UNTIMED_STEPS, len(self.times) // 5)
        return History(
            losses=torch.stack(self.losses).tolist(),
            held_out_loss=self.held_out_loss(held_out),
            first_seconds=self.first_seconds,
            step_ms=[read() for read in self.times[untimed:]],
            peak_bytes=kept + self.step_bytes if self.device.type == "cuda" else None,
        )


def train(
    attentions: Mapping[str, Attention],
    sizes: GPTConfig,
    config: TrainingConfig,
    *,
    batches: Batches,
    held_out: Batches,
    device: torch.device,
) -> dict[str, History]:
    """Train one model per attention function, in step with each other; every batch is one step of each."""
    trainees = {
        name: Trainee(sizes, config, attention, device) for name, attention in attentions.items()
    }
    for trainee in trainees.values():
        trainee.prepare(batches[0])
    order = list(trainees.values())
    shuffle = random.Random(config.seed).shuffle
    for step in range(len(batches)):
        shuffle(order)
        for trainee in order:
            trainee.step(batches[step], config.learning_rate_at(step, len(batches)))
    _synchronize(device)
    return {name: trainee.history(held_out) for name, trainee in trainees.items()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start timing; the answer stops it, and what that answers reads the milliseconds, once the device is done."""
    if device.type != "cuda":
        begin = time.perf_counter()

        def stop_wall() -> Callable[[], float]:
            milliseconds = (time.perf_counter() - begin) * 1e3
            return lambda: milliseconds

        return stop_wall
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # untyped in torch
    first, last = event(enable_timing=True), event(enable_timing=True)
    first.record()

    def stop_events() -> Callable[[], float]:
        last.record()
        return lambda: first.elapsed_time(last)

    return stop_events
