"""The command ``records prove``: proofs for records, by verifying their kernels on the present GPU."""

from __future__ import annotations

import argparse

from ..arch import resolve
from ..errors import UnsupportedArchitectureError
from ..settings import current, override
from ..tuning.pipeline import LocalPipeline, Pipeline
from ..tuning.proving import Proven, Prover
from ..tuning.record_schema import TuningRecord
from .console import progress
from .options import FAILED, OK, add_jobs, command, option
from .recording import add_all, add_optional_pattern, matching, places, print_entries

add_again = option("--again", action="store_true", help="those that have a proof, too")


@command("records prove", add_optional_pattern, add_jobs, add_all, add_again)
def run_prove(arguments: argparse.Namespace) -> int:
    """Verify kernels of records on the present GPU, and keep the proofs.

    Verify each kernel of records once on the present GPU, and keep the proof with every entry that is of that kernel.
    Those that have a proof are left out.
    """
    matched = [(place, matching(place, arguments.pattern)) for place in places(arguments)]
    records = [item.record for _, kept in matched for item in kept if item.record is not None]
    # Nothing is timed, so that the GPU may do other work.
    with override(allow_busy=True, **({"jobs": arguments.jobs} if arguments.jobs else {})):
        pipeline = local_pipeline()
        if not pipeline.can_measure():
            raise UnsupportedArchitectureError(
                "proofs need a GPU, and torch to drive it: there is none here"
            )
        prover = Prover(pipeline=pipeline, every=arguments.all, again=arguments.again)
        with progress(quiet=arguments.json) as show:
            verified = prover.verify(records, show)
    said: list[Proven] = []
    written = 0
    for place, kept in matched:

        def proven(record: TuningRecord) -> TuningRecord | None:
            new, entries = prover.prove(record, verified)
            said.extend(entries)
            return new

        written += place.rewrite({item.key for item in kept if item.record is not None}, proven)
    before = f"{len(verified)} kernels verified; "
    kernels = {candidate.name: item.outcome.to_json() for candidate, item in verified.items()}
    print_entries(arguments, said, written, "without a proof", before, kernels=kernels)
    return FAILED if any(item.state in ("failed", "changed") for item in said) else OK


def local_pipeline() -> Pipeline:
    """This machine's, for the present GPU."""
    return LocalPipeline(resolve(None), current())
