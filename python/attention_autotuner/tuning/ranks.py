"""The ranks of a process group while they search together: what they tell one another, and who is still there.

They talk through the group's store, never by collectives: any backend will do, no GPU takes part, and a rank that waits
sees within seconds that another one failed or is gone.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..core.identity import digest16
from ..errors import DistributedError
from .worker import outcome_or_data

BEAT_SECONDS = 0.5  # between signs of life
SILENT_SECONDS = 15.0  # without one, after which a rank counts as gone
JOIN_SECONDS = 600.0  # for the last rank to come to the same search
LEAVE_SECONDS = 5.0  # for the others to have read the last step
POLL_SECONDS = 0.002

_SEARCHES: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of a group, by its name


@contextmanager
def _reaching_the_store() -> Iterator[None]:
    try:
        yield
    except DistributedError:
        raise
    except RuntimeError as error:  # the process that keeps it ended
        raise DistributedError(f"the store of the group is gone: {error}") from error


@contextmanager
def launched_group() -> Iterator[Any]:
    """The group of all ranks that ``torchrun`` started, this one on its GPU; None where it started none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield None
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's own
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Ranks:
    """The ranks of a group inside a ``with`` block, which all of them enter; an error in one ends it in all.

    Inside, records of this package's loggers begin with the rank.

    Args:
        group: a ``torch.distributed`` process group that this process belongs to; of any backend.

    Attributes:
        rank, size: of this process in the group, and of the group.
        leads_host: it is the first of the ranks on its host.

    Raises:
        DistributedError: there is no such group, or another rank failed, is gone, or does something else.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_available() or not dist.is_initialized():
            raise DistributedError(f"group={group!r}: torch.distributed is not initialised")
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise DistributedError(f"group={group!r}: this process is not one of its ranks")
        store = distributed_c10d._get_process_group_store(group)
        search = next(_SEARCHES[group.group_name])
        self._store = distributed_c10d.PrefixStore(f"attention_autotuner/{search}", store)
        self._exchanges = itertools.count()
        self._ended = threading.Event()
        self.leads_host = True
        self._lost = ""
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Ranks:
        self._factory = before = logging.getLogRecordFactory()

        def with_rank(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = before(*args, **kwargs)
            if record.name.startswith("attention_autotuner"):
                record.msg = f"{self.prefix}{record.msg}"
            return record

        with _reaching_the_store():
            self._store.add(f"beat/{self.rank}", 1)  # one that dies after this was there
        logging.setLogRecordFactory(with_rank)
        self._watcher.start()
        try:
            hosts = self.exchange("beginning", socket.gethostname())
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self.leads_host = hosts.index(hosts[self.rank]) == self.rank
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.exchange("end", None)
            elif not self._lost:
                with suppress(RuntimeError):  # the store is gone: they see that, too
                    said = f"rank {self.rank} failed: {type(error).__name__}: {error}"
                    self._store.set("failure", said)
        finally:
            self._ended.set()
            self._watcher.join()
            logging.setLogRecordFactory(self._factory)
        if error is None:  # the process that keeps the store, most often the first, leaves last
            self._store.add("left", 1)
            deadline = time.monotonic() + LEAVE_SECONDS
            while not self.rank and self._store.add("left", 0) < self.size:
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)

    @property
    def prefix(self) -> str:
        """The rank as messages begin with it."""
        return f"[rank {self.rank}] "

    def check(self) -> None:
        """Raise what became of another rank, if anything did.

        Raises:
            DistributedError: it failed, or is gone.
        """
        if self._lost:
            raise DistributedError(self._lost)

    @_reaching_the_store()
    def exchange(self, step: str, value: Any) -> list[Any]:
        """Give a value to all ranks, and wait for theirs.

        Args:
            step: what the ranks are doing: the same on all, or they have gone different ways.
            value: as JSON has it, and outcomes.

        Returns:
            The values by rank.

        Raises:
            DistributedError: a rank failed, is gone, or is at another step.
        """
        serial = next(self._exchanges)
        said = json.dumps([step, value], default=lambda outcome: outcome.to_json())
        self._store.set(f"{serial}/{self.rank}", said)
        values = []
        for rank in range(self.size):
            while not self._store.check([f"{serial}/{rank}"]):
                self.check()
                time.sleep(POLL_SECONDS)
            text = self._store.get(f"{serial}/{rank}").decode()
            theirs, value = json.loads(text, object_hook=outcome_or_data)
            if theirs != step:
                raise DistributedError(
                    f"rank {self.rank} is at {step!r} while rank {rank} is at {theirs!r}: all ranks of a group "
                    "make the same calls, with the same settings"
                )
            values.append(value)
        if serial > 1:  # all have read it: they have come to the one after it
            self._store.delete_key(f"{serial - 2}/{self.rank}")
        return values

    def agree(self, step: str, value: Any) -> None:
        """Compare the digests of a value that all ranks must have in common.

        Raises:
            DistributedError: they differ.
        """
        digests = self.exchange(step, digest16(value))
        if len(set(digests)) > 1:
            said = ", ".join(f"rank {rank} {digest}" for rank, digest in enumerate(digests))
            raise DistributedError(f"the ranks differ in their {step}, by digest: {said}")

    def _watch(self) -> None:
        """Give signs of life, and look for those of the others."""
        beats = {rank: (0, time.monotonic()) for rank in range(self.size) if rank != self.rank}
        try:
            while not self._ended.wait(BEAT_SECONDS) and not self._lost:
                self._store.add(f"beat/{self.rank}", 1)
                for rank, (before, since) in beats.items():
                    count, now = self._store.add(f"beat/{rank}", 0), time.monotonic()
                    if count != before:
                        beats[rank] = (count, now)
                    elif now - since > (SILENT_SECONDS if count else JOIN_SECONDS):
                        self._lost = f"nothing was heard of rank {rank} for {now - since:.0f} s"
                if self._store.check(["failure"]):
                    self._lost = self._store.get("failure").decode()
        except RuntimeError as error:
            self._lost = f"the store of the group is gone: {error}"
