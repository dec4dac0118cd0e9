"""The rule on register spills: a kernel whose main loop spills too much takes no part.

Search, sweep and the main job ask it, and nothing else decides on spills.
"""

from __future__ import annotations

from ..core.candidate import Candidate
from ..core.outcome import Ok, Outcome, Spilled
from ..core.problem import Direction
from ..core.report import Counts
from ..kernels.registry import kernel_of

# Bytes a thread that a main loop may spill and still be timed. See docs/kernel_log.md.
SPILL_WORTH_TIMING = 256
# The same where no clock will tell. Most tiles of a backward kernel leave their accumulators a register or two short;
# a smaller tile is not known to be faster.
TOLERATED_UNTIMED: dict[Direction, int] = {"forward": 0, "backward": SPILL_WORTH_TIMING}


def spilled_bytes(report: Counts) -> int:
    """Bytes that a thread of the worst kernel of a library spills, stores and loads."""
    return report.spill_store_bytes + report.spill_load_bytes


def check_spills(candidate: Candidate, report: Counts, *, timed: bool) -> Outcome:
    """Judge a built kernel by what its main loop spills.

    Of some kernels the loop is all there is, and holds no MMA to be recognised by. Where nobody looked into the
    loops, a clock decides if there is one; otherwise all spills count as inside.

    Args:
        candidate: the kernel.
        report: what its compiler said.
        timed: measured, or about to be; otherwise only the model ranks it.

    Returns:
        :class:`~..core.outcome.Ok`, or :class:`~..core.outcome.Spilled` with its reason.
    """
    spilled = spilled_bytes(report)
    unseen = report.loop_spills is None and not timed
    in_loop = report.loop_spills or unseen or kernel_of(candidate).spills_in_loop
    tolerated = SPILL_WORTH_TIMING if timed else TOLERATED_UNTIMED[candidate.direction]
    if in_loop and spilled > tolerated:
        return Spilled(reason=f"the main loop spills; {spilled} bytes a thread in all")
    return Ok()
