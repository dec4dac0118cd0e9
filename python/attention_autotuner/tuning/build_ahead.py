"""Building kernels in the background, in order, while others are measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from math import inf

from ..codegen.build import Progress
from ..codegen.render import render
from ..core.candidate import Candidate
from ..core.outcome import Outcome, Postponed
from .pipeline import Built, Pipeline


class BuildAhead:
    """Builds candidates one by one, several at once, the first of the list first.

    Each build is a batch of its own: a compiler that sees all kernels at once links none before it has compiled nearly
    all, and the first race would wait for the last kernel.

    Args:
        pipeline: builds; called from several threads.
        candidates: in the order in which they are wanted.
        jobs: how many at once.
        on_built: called in this thread's waits with (done, total, name, seconds) of each.
        deadline: of ``time.monotonic``, seconds; what is not built then is given up.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        candidates: Sequence[Candidate],
        *,
        jobs: int,
        on_built: Progress = lambda done, total, name, seconds: None,
        deadline: float = inf,
    ) -> None:
        self._pipeline = pipeline
        self._on_built = on_built
        self._reported: set[Candidate] = set()
        self._seconds: dict[Candidate, float] = {}
        self._stopped = threading.Event()
        self._closed = threading.Event()
        self._deadline = deadline
        self._started = time.monotonic()
        self._finished = 0.0
        self._executor = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="build")
        self._futures: dict[Candidate, Future[Built | Outcome | None]] = {
            candidate: self._executor.submit(self._build, candidate)
            for candidate in dict.fromkeys(candidates)
        }

    def _build(self, candidate: Candidate) -> Built | Outcome | None:
        if self._stopped.is_set():
            return None
        started = time.monotonic()
        (result,) = self._pipeline.build([render(candidate)], lambda *_: None, self._is_over)
        if isinstance(result, Postponed):
            return None
        self._finished = time.monotonic()
        self._seconds[candidate] = self._finished - started
        return result

    def _is_over(self) -> bool:
        return self._closed.is_set() or time.monotonic() > self._deadline

    def ready(self, candidates: Collection[Candidate]) -> bool:
        """True when all of some candidates have been built, have failed, or will not be built any more."""
        self._tell()
        return all(self._futures[candidate].done() for candidate in candidates)

    def wait(self, candidates: Collection[Candidate], seconds: float) -> bool:
        """Wait until :meth:`ready`, or for some seconds; returns :meth:`ready`."""
        futures = [self._futures[candidate] for candidate in candidates]
        pending = [future for future in futures if not future.done()]
        if pending and seconds > 0:
            wait(pending, timeout=seconds, return_when=FIRST_COMPLETED)
        return self.ready(candidates)

    def results(self, candidates: Collection[Candidate]) -> Mapping[Candidate, Built | Outcome]:
        """The results of some candidates; those that are not built are missing.

        Raises:
            ToolchainError, StoreError, BuildError: the build of one could not be attempted.
        """
        results: dict[Candidate, Built | Outcome] = {}
        for candidate in candidates:
            future = self._futures[candidate]
            if future.done() and not future.cancelled():
                result = future.result()
                if result is not None:
                    results[candidate] = result
        return results

    def stop(self) -> None:
        """Begin no more builds; those that run go on."""
        self._stopped.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """:meth:`stop`, and end the builds that run."""
        self._closed.set()
        self.stop()
        self._executor.shutdown(wait=True)

    @property
    def seconds(self) -> float:
        """From the first build's start to the last one's end so far."""
        return max(0.0, self._finished - self._started)

    @property
    def built(self) -> int:
        """The number of builds that are over, failures included."""
        over = [f for f in self._futures.values() if f.done() and not f.cancelled()]
        return sum(f.exception() is None and f.result() is not None for f in over)

    def _tell(self) -> None:
        for candidate, future in self._futures.items():
            if future.done() and candidate not in self._reported:
                self._reported.add(candidate)
                seconds, total = self._seconds.get(candidate, 0.0), len(self._futures)
                self._on_built(len(self._reported), total, candidate.name, seconds)
