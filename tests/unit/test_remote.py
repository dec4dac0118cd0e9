"""Tensors of torch, handed to a process without it, and references that the caller's modes do not touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.bindings import ways_of
from attention_autotuner.tuning import devices, isolated, remote
from tests.fake_tasks import HostDevice

CPU = torch.device("cpu")
SMALL = Problem(
    batch=2, heads_q=2, heads_kv=1, seqlen_q=33, seqlen_k=45, dim_qk=16, dim_v=24, causal=True
)
PROBLEMS = {
    "forward": SMALL,
    "unaligned": replace(SMALL, alignment_bytes=2),
    "backward": replace(SMALL, direction="backward"),
    "bounded": replace(SMALL, key_bounds=True),
    "masked": replace(SMALL, op="retnet", mask="explicit"),
    "decayed": replace(SMALL, op="retnet", mask="decay", direction="backward"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_inputs_arrive_with_their_bits_strides_and_alignment(name: str) -> None:
    problem = PROBLEMS[name]
    for way in ways_of(problem):
        inputs = way.inputs(problem, seed=3, device=CPU)
        shared, handed = remote.hand_over(inputs, way.output_shapes(problem), repeats=2)
        arrived: Any = devices.copied(devices.read_inputs(HostDevice(0), handed))
        assert arrived.scalars == inputs.scalars
        assert list(arrived.tensors) == list(inputs.tensors)
        for key, tensor in inputs.tensors.items():
            array = arrived.tensors[key]
            assert (array.shape, array.stride()) == (tuple(tensor.shape), tensor.stride())
            assert (array.data_ptr() - tensor.data_ptr()) % 256 == 0
            strides = [tensor.element_size() * stride for stride in tensor.stride()]
            bits = f"u{tensor.element_size()}"
            there = np.ndarray(array.shape, bits, array.memory, offset=array.lead, strides=strides)
            here = tensor.contiguous().view(torch.uint8).numpy().view(bits).reshape(tensor.shape)
            assert np.array_equal(there, here)
        places = [place for place in handed["outputs"].values() for _ in place["offsets"]]
        offsets = [offset for place in handed["outputs"].values() for offset in place["offsets"]]
        ends = [o + place["num_bytes"] for o, place in zip(offsets, places, strict=True)]
        assert len(offsets) == 2 * len(way.output_shapes(problem))
        assert all(end <= begin for end, begin in zip(ends, offsets[1:], strict=False))
        assert ends[-1] <= shared.data.size


@contextmanager
def modes() -> Iterator[None]:
    """Modes that a training program may be in when it searches."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            stack.enter_context(torch.device("meta"))
            yield
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_default_dtype() == torch.float64
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_proof_is_the_same_whatever_the_callers_modes_are(
    fake_kernel: Callable[..., Path], direction: str
) -> None:
    tiles = ["-DBLOCK_M=16", "-DBLOCK_N=16"]
    options = [*tiles, "-DBACKWARD"] if direction == "backward" else tiles
    library: Any = SimpleNamespace(path=fake_kernel(*options), launch_knobs={})
    runner = isolated.InProcess(0, tasks="tests.fake_tasks")
    problem = PROBLEMS[direction]
    expected = isolated.verify(runner, problem, library, deterministic=True)
    assert expected.ok, expected.reason
    with modes():
        outcome = isolated.verify(runner, problem, library, deterministic=True)
        held, _ = remote.race_of(problem, 0, 0)
    assert outcome == expected
    assert np.array_equal(held.data, remote.race_of(problem, 0, 0)[0].data)
