"""Every operation, by name: what the rest of the package asks of one without naming it."""

from __future__ import annotations

from ..core.operation import Semantics
from .attention.problem import SEMANTICS as ATTENTION
from .retention.problem import SEMANTICS as RETENTION
from .retnet.problem import SEMANTICS as RETNET

SEMANTICS: dict[str, Semantics] = {one.op: one for one in (ATTENTION, RETNET, RETENTION)}
