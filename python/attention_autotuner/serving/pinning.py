"""Candidates that a call names: its ``config``, carried in the name of a policy to wherever a kernel is chosen."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..arch import Policy, naming
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..errors import UnknownCandidateError
from ..kernels.configs import candidate_from_config

Config = str | Mapping[str, Any]
"""A candidate: its name, or its ``config``."""

SEPARATOR = "@"  # of a policy's name and of candidates' names


def pinned_name(device_type: naming.DeviceType | None, config: Config | Sequence[Config]) -> str:
    """The name of a policy with candidates pinned: a device type as :func:`~..arch.naming.policy_name` takes it.

    Args:
        device_type: whose candidates; None for those of the GPU at hand.
        config: a candidate, or several: one for each direction.

    Raises:
        UnknownCandidateError: a config is no candidate's, or there is none.
        UnsupportedArchitectureError: the policy is unknown.
    """
    configs: Any = [config] if isinstance(config, (str, Mapping)) else config
    # Bytes are a sequence, of numbers.
    if not isinstance(configs, Sequence) or isinstance(configs, (bytes, bytearray)) or not configs:
        raise UnknownCandidateError(
            f"config must be a candidate's name or its config, or a list of them, got {_shown(config)}"
        )
    policy = "" if device_type is None else naming.policy_name(device_type)
    name = SEPARATOR.join([policy, *map(_name_of, configs)])
    naming.NAMES.remember(name, name)
    return name


def _name_of(config: Config) -> str:
    if isinstance(config, str):
        return config
    if not isinstance(config, Mapping):
        raise UnknownCandidateError(
            f"config must be a candidate's name or its config, got {_shown(config)}"
        )
    try:
        return candidate_from_config(config).name
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UnknownCandidateError(
            f"config must be a candidate's name or its config, got {config!r}: {error}"
        ) from error


def _shown(value: object) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


def split(name: str) -> tuple[str, list[str]]:
    """A policy's name, and those of the candidates that are pinned with it."""
    policy, *candidates = name.split(SEPARATOR)
    return policy, candidates


def pinned(problem: Problem, policy: Policy, names: Sequence[str]) -> Candidate | None:
    """The candidate that names pin for a problem; None where they are all of the other direction.

    Args:
        problem: as called.
        policy: whose candidates, with the families that the GPU runs.
        names: of candidates.

    Raises:
        UnknownCandidateError: a name is not among the problem's candidates, or there are two.
    """
    other = "backward" if problem.direction == "forward" else "forward"
    wanted = [name for name in names if not name.startswith(f"{problem.op}_{other}_")]
    if not wanted:
        return None
    # Records name candidates of the bucket, defaults those of the rounded lengths.
    offered = dict.fromkeys((problem.rounded(), problem.bucketed()))
    legal = {candidate.name: candidate for at in offered for candidate in policy.legal(at)}
    described = f"{problem.describe()} on {policy.name}"
    for name in wanted:
        if name not in legal:
            near = difflib.get_close_matches(name, legal, n=3, cutoff=0.4)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise UnknownCandidateError(
                f"config={name!r} is none of the {len(legal)} candidates for {described}{hint} "
                "(`attention-autotuner candidates --full` lists them)"
            )
    if len(wanted) > 1:
        raise UnknownCandidateError(f"config names {len(wanted)} candidates for {described}")
    return legal[wanted[0]]
