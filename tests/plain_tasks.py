"""Tasks of a worker without torch: what the two sides of a worker do is tested with them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from attention_autotuner.core.outcome import Crashed, LaunchFailed, Ok, Outcome, Proof
from attention_autotuner.tuning.rounds import FaultError

REFUSED = 7  # no such device


def classify(error: Exception) -> Outcome:
    return LaunchFailed(reason=str(error))


class Tasks:
    def __init__(self, tell: Callable[[str | None, float | None], None]) -> None:
        self._tell = tell

    def open(self, device: int, memory_bytes: int | None = None) -> None:
        self._memory_bytes = memory_bytes
        if device == REFUSED:
            raise RuntimeError("the device is busy or unavailable")

    def pid(self) -> int:
        return os.getpid()

    def memory(self) -> int | None:
        return self._memory_bytes

    def echo(self, value: object) -> object:
        return value

    def proven(self, checks: list[str]) -> Outcome:
        ratios = {"o": 0.5}
        proof = Proof(
            verifier="v", gpu_name="g", checks=(*checks,), repeats=2, same_bits=True, ratios=ratios
        )
        return Ok(proof=proof)

    def fail(self, *, known: bool) -> None:
        if known:
            raise FaultError(Crashed(reason="the context is lost"), "third")
        raise ValueError("no race was prepared")

    def crash(self, at: str | None = None, number: int = signal.SIGSEGV) -> None:
        self._tell("earlier", 0.0)
        self._tell(at, 0.0)
        os.kill(os.getpid(), number)

    def leave(self, status: int) -> None:
        os.write(2, b"these are the last words")
        os._exit(status)

    def write(self, count: int) -> int:
        line = b"a line of thirty-two characters\n"
        for _ in range(count // len(line)):
            os.write(1, line)
        return count

    def overwrite(self) -> None:
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"neither JSON nor an answer\n")
            except OSError:  # noqa: PERF203  # one of them is the channel
                continue

    def hang(self, *, seconds: float | None, at: str | None = None) -> None:
        self._tell(at, seconds)
        time.sleep(600)

    def start_a_child(self) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            sys.exit()
        return pid
