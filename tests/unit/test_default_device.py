"""Calls under ``torch.set_default_device``, whose mode changes none of ours, beside those under modes that may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from attention_autotuner.api.shared import plain


@pytest.fixture(autouse=True)
def _default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_tensors_stay_plain() -> None:
    x = torch.ones(4)
    assert not plain.is_watched()
    assert plain.addresses(x) == [x.data_ptr()]


def test_another_mode_is_still_seen() -> None:
    x = torch.ones(4)
    with BaseTorchFunctionMode():
        assert plain.is_watched()
        assert plain.addresses(x) is None
    assert not plain.is_watched()
