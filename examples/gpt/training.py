"""Training several models in step with each other: one seed, the same batches, steps taken in turn.

The models differ in their attention alone. Each step goes round all of them in random order, so that none has the
clocks or the caches to itself, and their step times can be compared.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..shared.data import Batches
from ..shared.script import Progress, Session, say
from ..shared.training import Schedule
from .attentions import Attention, sdpa
from .model import GPT, GPTConfig

UNTIMED_STEPS = 10
"""The first steps are not timed: clocks, allocator and caches settle. Memory is measured in them alone, as asking the
allocator holds the host up, and small models' steps would be bound by that."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Schedule):
    """The optimizer's settings, the seed of weights and of the order of models, and a mode of ``torch.compile``."""

    seed: int = 0
    compile_mode: str | None = None


class Trainee:
    """One model, its optimizer, and the measurements of its training."""

    def __init__(self, model: GPT, config: TrainingConfig, device: torch.device) -> None:
        self.config, self.device, self.on_gpu = config, device, device.type == "cuda"
        self.model = model
        self.optimizer = config.optimizer(self.model)
        self.compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self.model
        if config.compile_mode is not None:
            self.compute = torch.compile(self.model, fullgraph=True, mode=config.compile_mode)
        self.losses: list[torch.Tensor] = []
        self.times: list[tuple[Any, Any]] = []
        self.step_bytes = 0

    def prepare(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Go forward and back once and forget it: kernels are built and graphs compiled before anything counts."""
        self._gradients(batch)
        self.optimizer.zero_grad()

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], step: int, steps: int) -> None:
        """One optimizer step; the host does not wait for the device."""
        before, measured = 0, self.on_gpu and len(self.times) < UNTIMED_STEPS
        if measured:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        start = _now(self.on_gpu)
        self.losses.append(self._gradients(batch))
        self.config.update(self.optimizer, step, steps)
        self.times.append((start, _now(self.on_gpu)))
        if measured:
            peak = torch.cuda.max_memory_allocated(self.device) - before
            self.step_bytes = max(self.step_bytes, peak)

    def _gradients(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch's own
        # Parameters stay fp32; matrix products and attention run in bf16.
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.compute(*batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        return loss.detach().clone()  # a CUDA graph would overwrite the original

    @torch.no_grad()
    def held_out_loss(self, batches: Batches) -> float:
        """Mean loss over batches, without training on them."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            losses = [self.model(*batches[index]) for index in range(len(batches))]
        return float(torch.stack(losses).mean())

    def report(self, held_out: Batches, tokens: int) -> dict[str, Any]:
        """Everything that was measured.

        Args:
            held_out: text that was never trained on.
            tokens: in a step.

        Returns:
            ``losses`` of every step and ``held_out_loss`` after training, nats a byte; ``step_ms``, the median of all
            steps but the first few, and its quartiles; ``peak_bytes``, the most memory that parameters, optimizer and
            one of the first steps took together, None on the CPU.
        """
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        kept = sum(x.numel() * x.element_size() for x in [*self.model.parameters(), *state])
        untimed = min(UNTIMED_STEPS, len(self.times) // 5)
        step_ms = [_milliseconds(*pair) for pair in self.times[untimed:]]
        median = statistics.median(step_ms)
        low, _, high = statistics.quantiles(step_ms, n=4) if len(step_ms) > 1 else (median,) * 3
        return {
            "losses": torch.stack(self.losses).tolist(),
            "held_out_loss": self.held_out_loss(held_out),
            "step_ms": median,
            "step_ms_quartiles": [low, high],
            "steps_timed": len(step_ms),
            "tokens_per_second": tokens / median * 1e3,
            "peak_bytes": kept + self.step_bytes if self.on_gpu else None,
        }


def train(
    attentions: Mapping[str, Attention], sizes: GPTConfig, config: TrainingConfig, session: Session
) -> dict[str, dict[str, Any]]:
    """Train one model per attention function, in step with each other; every batch is one step of each.

    Returns:
        The report of each, as :meth:`Trainee.report`.
    """
    batches, device = session.batches, session.device
    torch.manual_seed(config.seed)
    # Weights are drawn once, by the CPU: of a wide model that takes seconds.
    initial = GPT(sizes, sdpa).to(device)
    trainees = {}
    for name, attention in attentions.items():
        say(
            f"first pass with {name}{', missing kernels are built' if device.type == 'cuda' else ''}"
        )
        trainees[name] = Trainee(initial.with_attention(attention), config, device)
        trainees[name].prepare(batches[0])
    order, progress = list(trainees.values()), Progress(len(batches))
    shuffle = random.Random(config.seed).shuffle
    for step in range(len(batches)):
        shuffle(order)
        for trainee in order:
            trainee.step(batches[step], step, len(batches))
        progress(step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    tokens = batches[0][0].numel()
    return {name: trainee.report(session.held_out, tokens) for name, trainee in trainees.items()}


def _now(on_gpu: bool) -> Any:
    """A moment: an event in the stream, or the clock's seconds."""
    if not on_gpu:
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    event.record()
    return event


def _milliseconds(first: Any, last: Any) -> float:
    """Time between two moments, once the device is done."""
    if isinstance(first, float):
        return (float(last) - first) * 1e3
    return float(first.elapsed_time(last))
