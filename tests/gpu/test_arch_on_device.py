"""The specs against the properties that the device reports."""

from __future__ import annotations

import json

import pytest
import torch

from attention_autotuner import arch
from attention_autotuner.arch.resolution import KNOWN
from attention_autotuner.cli import main

pytestmark = pytest.mark.gpu


def test_probing_agrees_with_torch() -> None:
    properties = torch.cuda.get_device_properties(0)
    probed = arch.probe(0)
    assert probed.name == properties.name
    assert probed.compute_capability == (properties.major, properties.minor)
    assert probed.num_sms == properties.multi_processor_count
    assert probed.smem_per_sm_bytes == properties.shared_memory_per_multiprocessor
    assert probed.max_threads_per_sm == properties.max_threads_per_multi_processor
    assert probed.l2_bytes == properties.L2_cache_size


def test_detect_follows_the_current_device() -> None:
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            assert arch.detect() is arch.detect(device)
            assert arch.resolve(None) is arch.detect(device)


def test_the_spec_of_this_gpu_agrees_with_the_device() -> None:
    probed = arch.probe(0)
    spec = next(
        (
            spec
            for spec, _ in KNOWN
            if spec.compute_capability == probed.compute_capability
            and any(name in probed.name for name in spec.device_names)
        ),
        None,
    )
    if spec is None:
        pytest.skip(f"{probed.name} has no spec here")
    for name in (
        "smem_per_sm_bytes",
        "smem_per_block_bytes",
        "smem_reserved_per_block_bytes",
        "registers_per_sm",
        "max_threads_per_sm",
        "max_blocks_per_sm",
    ):
        assert getattr(spec, name) == getattr(probed, name), name
    assert spec.num_sms >= probed.num_sms
    assert spec.l2_bytes >= probed.l2_bytes
    if probed.sm_clock_khz:
        assert spec.sm_clock_mhz <= probed.sm_clock_khz / 1e3


def test_doctor_finds_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    (gpu,) = (finding for finding in findings if finding["name"] == "GPU")
    assert gpu["state"] == "ok"
    assert torch.cuda.get_device_name(0) in gpu["detail"]


@pytest.mark.tune
def test_the_main_job_tunes_and_serves(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seqlen", "1024", "--dim-qk", "64", "--top-k", "2", "--no-confirm"]
    assert main(["tune", "--all", "--json", *small]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["served"]
    assert all(call["ok"] for call in said["served"])
    result = said["results"][0]
    assert result["problem"].startswith("attention forward")
    for tuned in said["results"]:
        assert tuned["status"] == "measured", tuned["problem"]
        assert tuned["record_path"] in said["files"]
    assert main(["why", *small[:4], "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["source"].startswith("record of ")
    kept = [row for row in explained["explanations"] if row["fate"] == "kept"]
    assert [row["name"] for row in kept] == [result["pick"]]
