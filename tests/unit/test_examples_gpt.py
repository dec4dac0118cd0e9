"""The GPT example on the CPU, tiny: its text, model, training, and the comparison of loss curves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attention_autotuner import flash_attn_func
from examples import train_gpt
from examples.gpt.agreement import LEAST_NOISE, WINDOW, WORST_FACTOR, compare
from examples.gpt.attentions import (
    Attention,
    autotuned,
    sdpa,
    sdpa_cudnn,
    sdpa_flash,
    sdpa_fp32,
    sdpa_other,
)
from examples.gpt.bars import bars_of, windows_of
from examples.gpt.model import GPT, GPTConfig, SelfAttention
from examples.gpt.training import TrainingConfig, train
from examples.shared import script
from examples.shared.data import HELD_OUT_EVERY, Batches, read_corpus
from examples.shared.script import Session

TINY = GPTConfig(layers=2, dim=32, heads_q=4, heads_kv=2, hidden=48, seqlen=32)
ARGUMENTS = [
    *("--device", "cpu", "--steps", "3", "--batch", "2", "--seqlen", "32"),
    *("--layers", "2", "--dim", "32", "--heads", "4", "--heads-kv", "2"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- data -----------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """As many files as two are held out of, some of them in folders that are no part of a library."""
    for number in range(2 * HELD_OUT_EVERY):
        folder = tmp_path / f"package{number % 3}"
        folder.mkdir(exist_ok=True)
        text = f"value = {number}\n" * 20
        (folder / f"module{number:02}.py").write_text(text, encoding="utf-8")
    for name in ("site-packages", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "other.py").write_text("stranger = 1\n", encoding="utf-8")
    return tmp_path


def test_the_corpus_is_the_same_each_time_and_is_split_by_file(sources: Path) -> None:
    first, second = read_corpus(sources), read_corpus(sources)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    assert first.digest == second.digest
    assert first.files == 2 * HELD_OUT_EVERY
    train_text, held_out = (bytes(split.tolist()) for split in (first.train, first.held_out))
    assert b"stranger" not in train_text + held_out
    lines = set(held_out.splitlines()) - {b""}
    assert len(lines) == 2
    assert not lines & set(train_text.splitlines())


def test_another_byte_gives_another_digest(sources: Path) -> None:
    before = read_corpus(sources).digest
    (sources / "package0" / "module00.py").write_text("value = -1\n", encoding="utf-8")
    assert read_corpus(sources).digest != before


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("pass\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"at least 20 .* holds 1"):
        read_corpus(tmp_path)


def test_batches_are_fixed_by_their_seed_and_targets_are_one_byte_on() -> None:
    text = torch.arange(200, dtype=torch.uint8)

    def batches(seed: int) -> Batches:
        return Batches(text, count=5, batch=3, seqlen=8, seed=seed, device="cpu")

    for step in (4, 0, 4):
        inputs, targets = batches(1)[step]
        again, _ = batches(1)[step]
        assert inputs.shape == targets.shape == (3, 8)
        assert torch.equal(inputs, again)
        assert torch.equal(inputs + 1, targets)  # of this text
    assert not torch.equal(batches(1)[0][0], batches(2)[0][0])
    assert not torch.equal(batches(1)[0][0], batches(1)[1][0])
    assert len(batches(1)) == 5
    with pytest.raises(IndexError, match="number 5"):
        batches(1)[5]


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="seqlen 8 needs a longer text than 8 bytes"):
        Batches(torch.zeros(8, dtype=torch.uint8), count=1, batch=1, seqlen=8, seed=0, device="cpu")


# --- model ----------------------------------------------------------------------------------------


def tokens(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(256, (2, TINY.seqlen + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def loss_of(attention: Attention) -> torch.Tensor:
    torch.manual_seed(0)
    model = GPT(TINY, attention)
    with torch.autocast("cpu", torch.bfloat16):
        return model(*tokens())


def test_attention_gets_what_its_docstring_says_and_the_loss_starts_at_chance() -> None:
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.extend((tuple(x.shape), x.dtype) for x in (q, k, v))
        return sdpa(q, k, v)

    loss = loss_of(spy)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)
    q, kv = (2, 4, 32, 8), (2, 2, 32, 8)
    assert seen == [(shape, torch.bfloat16) for shape in (q, kv, kv)] * TINY.layers


def test_the_attentions_are_one_function() -> None:
    q, k, v = (torch.randn(2, heads, 24, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    reference = sdpa(q.double(), k.double(), v.double())
    for attention in (autotuned, sdpa, sdpa_other, sdpa_flash, sdpa_cudnn, sdpa_fp32):
        torch.testing.assert_close(attention(q, k, v).double(), reference, rtol=0.02, atol=0.02)
    assert loss_of(autotuned).item() == pytest.approx(loss_of(sdpa).item(), abs=1e-3)


def test_a_model_with_another_attention_has_the_same_parameters_of_its_own() -> None:
    torch.manual_seed(0)
    first = GPT(TINY, sdpa)
    second = first.with_attention(autotuned)
    for model, attention in ((first, sdpa), (second, autotuned)):
        of_blocks = [m.attention for m in model.modules() if isinstance(m, SelfAttention)]
        assert of_blocks == [attention] * TINY.layers
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()


def test_the_model_is_causal() -> None:
    torch.manual_seed(0)
    model = GPT(TINY, sdpa)
    hidden = []
    model.norm.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    inputs, targets = tokens()
    changed = inputs.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    for text in (inputs, changed):
        model(text, targets)
    same = torch.isclose(hidden[0], hidden[1], rtol=0, atol=1e-6).all(-1)
    assert bool(same[:, :20].all())
    assert not bool(same[:, 20:].any())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 36}, "dim must be a multiple of 8 heads_q, got 36"),
        ({"heads_kv": 3}, "heads_q must be a multiple of heads_kv, got 4 and 3"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    sizes = {"layers": 2, "dim": 32, "heads_q": 4, "heads_kv": 2, "seqlen": 32, **change}
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)


# --- training -------------------------------------------------------------------------------------


def runs(steps: int, **attentions: Attention) -> dict[str, dict[str, Any]]:
    text = torch.arange(2000, dtype=torch.uint8)

    def batches(count: int) -> Batches:
        return Batches(text, count=count, batch=2, seqlen=TINY.seqlen, seed=0, device="cpu")

    session = SimpleNamespace(
        batches=batches(steps), held_out=batches(2), device=torch.device("cpu")
    )
    config = TrainingConfig(warmup_steps=1, learning_rate=3e-3)
    return train(attentions, TINY, config, cast("Session", session))


def test_training_learns_and_depends_on_nothing_but_attention() -> None:
    trained = runs(10, ours=autotuned, sdpa=sdpa, again=sdpa)
    assert trained["sdpa"]["losses"] == trained["again"]["losses"]
    assert trained["ours"]["losses"] == pytest.approx(trained["sdpa"]["losses"], abs=0.01)
    for run in trained.values():
        assert len(run["losses"]) == 10
        assert run["losses"][-1] < run["losses"][0] - 0.2
        assert run["held_out_loss"] < run["losses"][0]
        assert run["steps_timed"] == 8  # the first fifth is not timed
        assert 0.0 < run["step_ms_quartiles"][0] <= run["step_ms"] <= run["step_ms_quartiles"][1]
        assert run["peak_bytes"] is None


def test_a_wrong_attention_is_detected() -> None:
    """Without the mask a model sees the byte that it is to say."""

    def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=False)

    trained = runs(10, wrong=unmasked, ours=autotuned, sdpa=sdpa, other=sdpa_other, fp32=sdpa_fp32)
    references = [trained[name]["losses"] for name in ("sdpa", "other", "fp32")]
    assert compare(trained["ours"]["losses"], references).ok
    agreement = compare(trained["wrong"]["losses"], references)
    assert not agreement.ok
    assert "times the noise" in agreement.reason


def test_the_learning_rate_rises_and_falls() -> None:
    config = TrainingConfig(learning_rate=1.0, warmup_steps=10)
    rates = [config.learning_rate_at(step, 100) for step in range(100)]
    assert rates.index(max(rates)) in range(8, 12)
    assert rates[0] < 0.2
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


# --- agreement ------------------------------------------------------------------------------------


def wave(amplitude: float, phase: float, steps: int = 4 * WINDOW) -> list[float]:
    """A falling loss with noise that grows."""
    return [
        3.0 - step / steps + amplitude * step / steps * math.sin(step + phase)
        for step in range(steps)
    ]


REFERENCES = [wave(0.01, 0.0), wave(0.01, 2.0), wave(0.01, 4.0)]


def test_curves_within_the_noise_agree() -> None:
    agreement = compare(wave(0.01, 3.0), REFERENCES)
    assert agreement.ok, agreement.reason
    assert [window.first for window in agreement.windows] == [1, 26, 51, 76]
    assert [window.last for window in agreement.windows] == [25, 50, 75, 100]


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ([loss + 0.03 for loss in REFERENCES[0]], "the curves differ by"),
        ([*REFERENCES[0][:75], *(loss + 0.2 for loss in REFERENCES[0][75:])], "steps 76 to 100"),
        ([*REFERENCES[0][:-1], math.nan], "a loss of the candidate is not finite"),
    ],
    ids=["shifted", "late", "nan"],
)
def test_curves_beyond_the_noise_do_not(candidate: list[float], reason: str) -> None:
    agreement = compare(candidate, REFERENCES)
    assert not agreement.ok
    assert reason in agreement.reason


def test_an_infinite_reference_excuses_nothing() -> None:
    infinite = [*REFERENCES[1][:-1], math.inf]
    agreement = compare(REFERENCES[0], [REFERENCES[0], infinite])
    assert agreement.reason == "a loss of a reference is not finite"


def test_still_references_leave_room_for_rounding_only() -> None:
    flat = [2.0] * 10
    assert compare([2.0009] * 10, [flat, flat]).ok
    agreement = compare([2.01] * 10, [flat, flat])
    assert agreement.worst_ratio == pytest.approx(20.0, rel=1e-3)
    assert agreement.worst_ratio > WORST_FACTOR
    assert not agreement.ok


@pytest.mark.parametrize(
    ("candidate", "references", "message"),
    [
        ([1.0], [[1.0]], "at least 2 references, got 1"),
        ([1.0], [[1.0], [1.0, 2.0]], "one length"),
        ([], [[], []], "one length of at least 1"),
    ],
)
def test_curves_that_cannot_be_compared_are_refused(
    candidate: list[float], references: list[list[float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(candidate, references)


# --- bars -----------------------------------------------------------------------------------------


def trained(losses: list[float], step_ms: float) -> dict[str, Any]:
    return {"losses": losses, "step_ms": step_ms}


def seed_of(ours: float, flash_ms: float = 4.0, ours_ms: float = 3.0) -> dict[str, Any]:
    """Runs whose references are 0.01 apart, and ours some such distances from the first."""
    flat = [2.0] * (2 * WINDOW)
    return {
        "ours": trained([loss + ours * 0.01 for loss in flat], ours_ms),
        "flash": trained(flat, flash_ms),
        "cudnn": trained([loss - 0.01 for loss in flat], 3.2),
    }


def test_bars_are_of_each_seed_and_of_all() -> None:
    bars = bars_of({0: seed_of(2.0), 3: seed_of(0.5, ours_ms=3.6)}, "ours", ["flash", "cudnn"])
    first, second = bars["seeds"]
    assert (first["seed"], second["seed"]) == (0, 3)
    assert [x["gap"] for x in (first, second, bars["all"])] == pytest.approx([2.0, 0.5, 1.0])
    assert [x["gap_ok"] for x in (first, second, bars["all"])] == [False, True, True]
    assert bars["all"]["worst_gap"] == pytest.approx(2.0)
    assert bars["all"]["step_ms"] == pytest.approx({"ours": 3.3, "flash": 4.0, "cudnn": 3.2})
    assert [x["fastest"] for x in (first, second, bars["all"])] == ["cudnn"] * 3
    assert [x["time"] for x in (first, second)] == pytest.approx([3.0 / 3.2, 3.6 / 3.2])
    assert [x["time_ok"] for x in (first, second, bars["all"])] == [True, False, False]
    assert json.loads(json.dumps(bars)) == bars


def test_steps_are_held_to_the_fastest_reference_of_each_seed() -> None:
    bars = bars_of({0: seed_of(1.0, flash_ms=2.0)}, "ours", ["flash", "cudnn"])
    assert bars["all"]["fastest"] == "flash"
    assert bars["all"]["time"] == pytest.approx(1.5)


def test_a_window_has_its_own_noise_and_least_noise_counts_once() -> None:
    still, apart = [2.0] * WINDOW, [2.02] * WINDOW
    small = [2.0 + LEAST_NOISE / 10] * WINDOW
    first, second = windows_of(still + small, [still + still, apart + small])
    assert first.noise == pytest.approx(0.02)
    assert second.noise == pytest.approx(LEAST_NOISE / 10)
    assert second.ratio == 1.0
    runs = {
        "ours": trained(still + small, 1.0),
        "flash": trained(still + still, 1.0),
        "cudnn": trained(apart + small, 1.0),
    }
    bars = bars_of({0: runs}, "ours", ["flash", "cudnn"])
    assert bars["all"]["small_windows"] == 2  # our difference in the first, both in the second


def test_losses_that_are_no_numbers_miss_the_bar() -> None:
    runs = seed_of(1.0)
    runs["ours"]["losses"][-1] = math.nan
    figures = bars_of({0: runs}, "ours", ["flash", "cudnn"])["all"]
    assert figures["gap"] == math.inf
    assert not figures["gap_ok"]


# --- the whole script -----------------------------------------------------------------------------


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    monkeypatch.setattr(script, "read_corpus", lambda: read_corpus(sources))


@pytest.mark.usefixtures("small_corpus")
def test_the_script_trains_compares_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert train_gpt.main([*ARGUMENTS, "--deterministic", "--out", str(out)]) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    captured = capsys.readouterr()
    printed = captured.out
    assert "training on cpu, 3 steps of 2 x 32 bytes" in captured.err
    assert captured.err.index("first pass with flash_attn_func") < captured.err.index("step 1/3")
    assert "Loss curves agree within noise: yes" in printed
    assert "Two runs give the same bits: yes" in printed
    report = json.loads((out / "train_gpt.json").read_text(encoding="utf-8"))
    assert report["environment"]["torch"] == torch.__version__
    assert report["agreement"]["ok"] is True
    for run in report["runs"].values():
        assert len(run["losses"]) == 3
        assert run["tokens_per_second"] == pytest.approx(2 * 32 / run["step_ms"] * 1e3)


@pytest.mark.usefixtures("small_corpus")
def test_chosen_references_and_seeds_are_measured_by_bars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--references", "flash", "cudnn", "--seeds", "4", "7", "--out", str(tmp_path)]
    status = train_gpt.main([*ARGUMENTS, *chosen])
    captured = capsys.readouterr()
    report = json.loads((tmp_path / "train_gpt.json").read_text(encoding="utf-8"))
    assert report["seed"] == [4, 7]
    assert report["references"] == ["SDPA, flash", "SDPA, cuDNN"]
    for training in report["trainings"]:
        assert list(training["runs"]) == ["flash_attn_func", "SDPA, flash", "SDPA, cuDNN"]
        assert training["agreement"]["ok"] is True
    first, second = (t["runs"]["SDPA, flash"]["losses"] for t in report["trainings"])
    assert first != second
    bars = report["bars"]
    assert [figures["seed"] for figures in bars["seeds"]] == [4, 7]
    assert bars["all"]["gap"] == 1.0  # differences this small count as the least noise
    assert (status == 0) == report["ok"] == bars["all"]["time_ok"]
    assert "Bar of 1.5 for the loss gap: met" in captured.out
    assert "seed 7: ms a step: flash_attn_func" in captured.err
    assert "SDPA in fp32" not in captured.err


@pytest.mark.usefixtures("small_corpus")
def test_one_seed_by_either_option_gives_the_same_losses(tmp_path: Path) -> None:
    reports = []
    for option in (["--seed", "5"], ["--seeds", "5"]):
        out = tmp_path / option[0]
        assert train_gpt.main([*ARGUMENTS, *option, "--out", str(out)]) == 0
        reports.append(json.loads((out / "train_gpt.json").read_text(encoding="utf-8")))
    losses = [[run["losses"] for run in report["runs"].values()] for report in reports]
    assert losses[0] == losses[1]
    assert [report["bars"] for report in reports] == [None, None]
    assert [report["seed"] for report in reports] == [5, 5]
    assert list(reports[0]["runs"]) == [
        "flash_attn_func", "SDPA", "SDPA, other backend", "SDPA in fp32",
    ]  # fmt: skip


def test_one_reference_is_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*ARGUMENTS, "--references", "flash", "flash"]) == 2
    assert "at least two references are needed, got flash alone" in capsys.readouterr().err


@pytest.mark.usefixtures("small_corpus")
def test_the_script_fails_when_the_curves_disagree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_gpt, "autotuned", lambda q, k, v: 3.0 * sdpa(q, k, v))
    assert train_gpt.main([*ARGUMENTS]) == 1
    assert "times the noise" in capsys.readouterr().out


@pytest.mark.usefixtures("small_corpus")
def test_sizes_that_cannot_be_end_the_script_with_their_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_gpt.main([*ARGUMENTS, "--heads-kv", "3"]) == 2
    assert "heads_q must be a multiple of heads_kv, got 4 and 3" in capsys.readouterr().err


@pytest.mark.usefixtures("small_corpus")
def test_losses_that_are_no_numbers_fail_and_are_still_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_gpt, "autotuned", lambda q, k, v: math.nan * sdpa(q, k, v))
    assert train_gpt.main([*ARGUMENTS, "--out", str(tmp_path)]) == 1
    assert "a loss of the candidate is not finite" in capsys.readouterr().out
    report = json.loads((tmp_path / "train_gpt.json").read_text(encoding="utf-8"))
    assert report["ok"] is False
    assert math.isnan(report["runs"]["flash_attn_func"]["losses"][0])


def test_columns_of_steps_do_not_touch(capsys: pytest.CaptureFixture[str]) -> None:
    run = {"losses": [2.0], "step_ms": 1234.5, "step_ms_quartiles": (1234.25, 1235.75)}
    run |= {"peak_bytes": None, "tokens_per_second": 12345678.0, "held_out_loss": 2.5}
    agreement = {"windows": [], "mean_ratio": 0.5, "worst_ratio": 0.5, "reason": ""}
    runs = dict.fromkeys((train_gpt.OURS, "torch"), run)
    train_gpt.print_training({"runs": runs, "agreement": agreement, "same_bits": None}, "torch")
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("torch"))
    figures = ["1234.50", "1234.25", "..", "1235.75", "12345678", "-", "2.5000"]
    assert line.split() == ["torch", *figures]
