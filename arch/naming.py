"""Names for policies, for places that hold strings only, such as the schema of an op inside a compiled graph."""

from __future__ import annotations

import threading

from ..core.memo import Table
from .policy import Policy
from .resolution import detect, resolve

DeviceType = str | Policy | type[Policy]

# Compiled graphs hold the names.
NAMES: Table[DeviceType, str] = Table("policies.names", permanent=True)
POLICIES: Table[str, Policy] = Table("policies.named", permanent=True)
_lock = threading.Lock()


def policy_name(device_type: DeviceType) -> str:
    """The name under which :func:`policy_named` finds a policy again in this process.

    A policy that :func:`resolve` knows keeps its spec's name, which means the same in every process.

    Raises:
        UnsupportedArchitectureError: the policy is unknown.
    """
    try:
        name = NAMES.get(device_type)
    except TypeError:  # unhashable, so no device type; resolve says so
        name = None
    return name if name is not None else _register(device_type)


def policy_named(name: str, *, device: int) -> Policy:
    """The policy of a name.

    Args:
        name: from :func:`policy_name`, or any name that :func:`resolve` takes; empty is the device's own policy.
        device: CUDA device index.

    Raises:
        UnsupportedArchitectureError: there is no such policy.
    """
    if not name:
        return detect(device)
    return POLICIES[name if name in POLICIES else policy_name(name)]


def _register(device_type: DeviceType) -> str:
    policy = resolve(device_type)
    with _lock:
        name, number = policy.spec.name, 1
        while name in POLICIES and not _same(POLICIES[name], policy):
            number += 1
            name = f"{policy.spec.name}#{number}"
        if name not in POLICIES:
            POLICIES.remember(name, policy)
        NAMES.remember(device_type, name)
    return name


def _same(policy: Policy, other: Policy) -> bool:
    return type(policy) is type(other) and policy.spec == other.spec
