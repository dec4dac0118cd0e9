"""Ranks of a gloo group on this machine's CPU, each a process, for tests of searches that they make together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import attention_autotuner.tuning.functions
import attention_autotuner.tuning.search  # noqa: F401  # imported once, by the process that ranks are forked from

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.fake_ranks"])
KILLED = "killed"


def run_ranks(program: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """The answers of a program on each rank, called with the rank; or its error, or that it was killed."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
        processes = [
            CONTEXT.Process(
                target=_run, args=(f"{folder}/store", rank, size, pipe[1], program, arguments)
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, writing in pipes:
            writing.close()
        answers = []
        for (reading, _), process in zip(pipes, processes, strict=True):
            answers.append(_received(reading))
            process.join(5)
            process.kill()
        return answers


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv() if pipe.poll(60) else AssertionError("the rank does not end")
    except EOFError:
        return KILLED


def killed() -> None:
    """End this rank as the system would."""
    os.kill(os.getpid(), signal.SIGKILL)


def _run(
    store: str, rank: int, size: int, pipe: Any, program: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    files = dist.FileStore(store, size)  # type: ignore[attr-defined]  # torch exports it by *
    dist.init_process_group("gloo", store=files, rank=rank, world_size=size)
    try:
        answer: Any = program(rank, *arguments)
    except Exception as error:  # noqa: BLE001  # the test's to look at
        traceback.print_exc()
        answer = error
    pipe.send(answer)
    dist.destroy_process_group()
