"""The RetNet example on our kernels: the module in every form, decoding by a CUDA graph, and the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import retention_func
from attention_autotuner.reference import retention_recurrent
from examples import train_retnet
from examples.retnet.decoding import Decoder, with_rounded_weights
from examples.retnet.model import RetNet, RetNetConfig
from examples.retnet.retention import MultiScaleRetention, NormalisedRetention
from examples.retnet.training import FORMS, compare_forms, error_of, read_prompt

pytestmark = pytest.mark.gpu

DIM, HEADS, SEQLEN = 128, 2, 75


def token_by_token(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrent definition of retention."""
    q, k, v, gamma = tensors
    return retention_recurrent(q, k, v, gamma, initial_state=options["initial_state"])


@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_the_module_agrees_with_the_definition(form: str, device: torch.device) -> None:
    shape = (2, HEADS, DIM // HEADS, 2 * DIM // HEADS)
    results = []
    for dtype in (torch.float32, torch.float64):
        ours = dtype == torch.float32
        torch.manual_seed(0)
        op = retention_func if ours else token_by_token
        module = MultiScaleRetention(DIM, HEADS, train_decay=True, retention=op).to(device, dtype)
        generator = torch.Generator().manual_seed(1)
        x, before = (
            torch.randn(size, generator=generator).to(device, dtype).requires_grad_()
            for size in ((2, SEQLEN, DIM), shape)
        )
        with torch.autocast("cuda", torch.float16, enabled=ours):
            y, state = module(x, form=form, position=3, state=before, return_state=True)
        (y.to(dtype).sum() + state.sum()).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        results.append([y.detach(), state.detach(), x.grad, before.grad, *gradients])
    for a, b in zip(*results, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 8 * torch.finfo(torch.float16).eps


def test_the_module_agrees_with_the_normalised_op(device: torch.device) -> None:
    outputs = []
    for kind in (MultiScaleRetention, NormalisedRetention):
        torch.manual_seed(0)
        module = kind(DIM, HEADS).to(device)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, SEQLEN, DIM, generator=generator).to(device)
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            answer = module(x)
        outputs.append(answer if isinstance(answer, torch.Tensor) else answer[0])
    assert error_of(*outputs) < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forms_agree_and_a_graph_writes_the_same_as_eager_steps(
    dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = RetNet(RetNetConfig(layers=2, dim=DIM, heads=HEADS, hidden=256)).to(device)
    tokens = torch.randint(256, (2, SEQLEN), generator=torch.Generator().manual_seed(0)).to(device)
    agreement = compare_forms(model, tokens, dtype)
    assert agreement.ok, agreement
    writer = with_rounded_weights(model, dtype)
    first, state = read_prompt(writer, tokens, dtype)
    eager, replayed = (Decoder(writer, state, first, dtype) for _ in range(2))
    replayed.capture()
    for a, b in zip(eager.run(20), replayed.run(20), strict=True):
        assert torch.equal(a, b)
    assert int(state.position) == SEQLEN  # both decoders work on copies


def test_the_script_trains_and_decodes(tmp_path: Path) -> None:
    arguments = ["--steps", "60", "--batch", "8", "--seqlen", "256", "--decode", "32"]
    assert train_retnet.main([*arguments, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "train_retnet.json").read_text(encoding="utf-8"))
    assert report["device"].startswith("cuda")
    assert report["environment"]["gpu_name"]
    assert report["losses"][-1] < report["losses"][0] - 1.0
    assert report["decoding"]["same_text"] is True
    assert 0 < report["decoding"]["step_ms"]["graph"] < report["decoding"]["step_ms"]["eager"]
