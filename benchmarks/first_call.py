"""The first calls of a process that has prebuilt kernels and no compiler, from the function call to the result.

``python -m benchmarks.first_call --output FILE`` writes the kernels of one class for the present GPU as a package,
unpacks it as pip would, and starts one process after another with an empty cache. The GPU is in use before the first
call, as in any program; imports and CUDA's own start are outside the figures. Status 1: a process failed, was wrong, or
was beyond the bar; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from attention_autotuner.arch import detect
from attention_autotuner.cli.options import positive
from attention_autotuner.codegen.bundle import open_bundle
from attention_autotuner.codegen.kernel_wheel import write_wheel
from attention_autotuner.errors import BuildError, UnsupportedArchitectureError
from attention_autotuner.tuning.environment import collect

from .results import write

SCHEMA = 1
BAR_SECONDS = 1.0
REPEATS = 5
SHAPE = (4, 16, 4096)
"""[batch, heads, seqlen] of the problem that is exported; 64 wide."""
WAYS = ("forward", "backward")
# What would tell the process of a compiler, or of kernels other than those it is given.
OWN_KERNELS = {"ATTENTION_AUTOTUNER_STRICT_KERNELS": "1"}  # or the reference would be timed
UNWANTED = ("CUDA_HOME", "CUDA_PATH", "ATTENTION_AUTOTUNER_NVCC", "ATTENTION_AUTOTUNER_BUNDLE")
PROGRAM = """
import json, sys, time
import torch
from attention_autotuner import flash_attn_func, reference
from attention_autotuner.codegen import toolchain

for name in ("nvcc_places", "wheel_roots", "cu12_places"):
    setattr(toolchain, name, lambda: iter(()))
batch, heads, seqlen = map(int, sys.argv[1:4])
make = lambda: torch.randn(batch, heads, seqlen, 64, dtype=torch.float16, device="cuda")
q, k, v = (make().requires_grad_() for _ in range(3))
dout = make()
torch.cuda.synchronize()
start = time.perf_counter()
o = flash_attn_func(q, k, v)
torch.cuda.synchronize()
forward = time.perf_counter() - start
start = time.perf_counter()
o.backward(dout)
torch.cuda.synchronize()
backward = time.perf_counter() - start
inputs = [leaf.detach() for leaf in (q, k, v)]
exact, low = reference.attention(*inputs)[0], reference.attention_low(*inputs)[0]
check = reference.check(o.detach(), exact, low, reference.Bands(heads=1))
print(json.dumps({
    "forward": forward,
    "backward": backward,
    "ok": check.ok,
    "why": check.reason,
    "finite": all(bool(leaf.grad.isfinite().all()) for leaf in (q, k, v)),
}))
"""


def export(output: Path) -> Path:
    """Write the kernels of one class, forward and backward, for the GPU at hand.

    Raises:
        BuildError: the command fails; the message ends with its own words.
    """
    command = [sys.executable, "-m", "attention_autotuner", "export", "--output", str(output)]
    command += ["--direction", "step", "--dim-qk", "64", "--json"]
    _run("the export of kernels", command, dict(os.environ))
    return output


def install(bundle: Path, folder: Path) -> dict[str, str]:
    """Make a bundle a package in a folder of its own.

    Returns:
        The environment variables by which a process finds it.
    """
    wheel = write_wheel(open_bundle(bundle), detect(0).spec.name, folder / "dist")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")  # what pip does with a wheel of data
    places = [str(folder / "site"), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(place for place in places if place)}


def first_call(cache: Path, shape: tuple[int, int, int], **variables: str) -> dict[str, Any]:
    """The first calls of one fresh process.

    Args:
        cache: its cache folder.
        shape: [batch, heads, seqlen].
        variables: of its environment, beside the present ones.

    Returns:
        Seconds of ``forward`` and ``backward``, whether the output is right (``ok``, ``why``), and whether the
        gradients are finite.

    Raises:
        BuildError: it fails; the message ends with its own words.
    """
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    said = _run(
        "the process of a first call",
        [sys.executable, "-c", PROGRAM, *map(str, shape)],
        {**kept, **OWN_KERNELS, "ATTENTION_AUTOTUNER_CACHE_DIR": str(cache), **variables},
    )
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def _run(what: str, command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{what} ended with {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


def report(calls: Sequence[dict[str, Any]], environment: dict[str, Any]) -> dict[str, Any]:
    """The document to commit.

    Args:
        calls: by :func:`first_call`, one of every process.
        environment: of the run.
    """
    seconds = {way: [call[way] for call in calls] for way in WAYS}
    right = all(call["ok"] and call["finite"] for call in calls)
    return {
        "benchmark": "first_call",
        "schema": SCHEMA,
        "shape": [*SHAPE, 64],
        "dtype": "fp16",
        "environment": environment,
        "bar_seconds": BAR_SECONDS,
        "seconds": seconds,
        "median_seconds": {way: median(times) for way, times in seconds.items()},
        "passed": right and all(max(times) <= BAR_SECONDS for times in seconds.values()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, install, start the processes; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_call", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--repeats", type=positive, default=REPEATS, help=f"processes ({REPEATS})")
    options = parser.parse_args(arguments)
    try:
        detect(0)
    except UnsupportedArchitectureError as error:
        print(error)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            variables = install(export(folder / "bundle"), folder)
            calls = [
                first_call(folder / f"cache{index}", SHAPE, **variables)
                for index in range(options.repeats)
            ]
        except BuildError as error:
            print(error)
            return 1
    document = report(calls, collect(0).to_json())
    write(options.output, document)
    for way in WAYS:
        times = document["seconds"][way]
        print(f"{way}: median {median(times):.3f} s, at most {max(times):.3f} s")
    for call in calls:
        if not call["ok"] or not call["finite"]:
            print(f"wrong: {call['why'] or 'a gradient is not finite'}")
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
