"""Policies by name, as in the schema of an op."""

from __future__ import annotations

import pytest

from attention_autotuner.arch import A100, H100, naming
from attention_autotuner.errors import UnsupportedArchitectureError


def test_a_policys_name_leads_back_to_the_policy() -> None:
    name = naming.policy_name(A100)
    assert name == naming.policy_name("a100") == "A100"
    assert isinstance(naming.policy_named(name, device=0), A100)

    class Mine(A100):
        name = "mine"

    mine = Mine()
    other = naming.policy_name(mine)
    assert other != name
    assert naming.policy_named(other, device=0) is mine
    assert naming.policy_name(mine) == other
    assert isinstance(naming.policy_named("A100", device=0), A100)


def test_a_spec_keeps_its_own_name() -> None:
    policy = naming.policy_named(naming.policy_name("h200"), device=0)
    assert isinstance(policy, H100)
    assert policy.spec.name == "H200"
    assert naming.policy_named("H100", device=0).spec.name == "H100"


def test_the_empty_name_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    present = A100()
    monkeypatch.setattr(naming, "detect", lambda device: {3: present}[device])
    assert naming.policy_named("", device=3) is present


@pytest.mark.parametrize("value", ["H900", [1], 7])
def test_values_that_are_no_device_type_are_refused(value: object) -> None:
    with pytest.raises(UnsupportedArchitectureError):
        naming.policy_name(value)  # type: ignore[arg-type]
