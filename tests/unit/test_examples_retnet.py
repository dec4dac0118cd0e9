"""The RetNet example on the CPU, tiny: its modules, forms and states, decoding, training and script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import retention_func
from attention_autotuner.reference import (
    decay_mask,
    retention_chunkwise,
    retention_parallel,
    retention_recurrent,
)
from examples import train_retnet
from examples.retnet.decoding import Decoder, with_rounded_weights
from examples.retnet.model import RetNet, RetNetConfig
from examples.retnet.retention import (
    MultiScaleRetention,
    NormalisedRetention,
    default_decay_logits,
    rotate,
)
from examples.retnet.training import (
    FORMS,
    TrainingConfig,
    compare_forms,
    error_of,
    logits_by_step,
    read_prompt,
    train,
)
from examples.shared import script
from examples.shared.data import Batches, read_corpus

DIM, HEADS, SEQLEN = 32, 2, 21
TINY = RetNetConfig(layers=2, dim=DIM, heads=HEADS, hidden=48)
ARGUMENTS = [
    *("--device", "cpu", "--steps", "3", "--batch", "2", "--seqlen", "24", "--decode", "6"),
    *("--layers", "2", "--dim", "32", "--heads", "2"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_double(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reference's form of the name asked for, in fp64: what the module adds is seen without rounding."""
    forms: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
        "parallel": retention_parallel,
        "chunkwise": retention_chunkwise,
        "recurrent": retention_recurrent,
    }
    q, k, v, gamma = tensors
    o, state = forms[options["form"]](q, k, v, gamma, initial_state=options["initial_state"])
    return o, state if options["output_final_state"] else None


def double_module(**options: Any) -> MultiScaleRetention:
    torch.manual_seed(0)
    return MultiScaleRetention(DIM, HEADS, retention=in_double, **options).double()


def inputs(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, SEQLEN, DIM, generator=generator, dtype=torch.float64).to(dtype)


def starting_state() -> torch.Tensor:
    """The state after earlier tokens. From nothing, the first token's output is one number times v: where that
    number is near 0, so is the divisor of the heads' norm, and rounding decides.
    """
    shape = (2, HEADS, DIM // HEADS, 2 * DIM // HEADS)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


# --- the modules ----------------------------------------------------------------------------------


def test_the_trained_decay_starts_at_the_usual_one() -> None:
    expected = 1 - 2.0 ** -torch.arange(5.0, 11.0)
    torch.testing.assert_close(default_decay_logits(6).sigmoid(), expected, rtol=1e-6, atol=0)


def test_scores_of_turned_queries_and_keys_depend_on_their_distance_alone() -> None:
    q, k = inputs().unflatten(-1, (HEADS, -1)).split(1)

    def scores(start: int) -> torch.Tensor:
        turned = [rotate(x, start).transpose(1, 2) for x in (q, k)]
        return turned[0] @ turned[1].mT

    torch.testing.assert_close(scores(0), scores(40), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(0), q.transpose(1, 2) @ k.transpose(1, 2).mT, atol=0.1)
    assert torch.equal(rotate(q, 7), rotate(q, torch.tensor(7)))
    assert torch.equal(rotate(q, 7)[:, :1], rotate(torch.cat((k[:, :7], q), dim=1), 0)[:, 7:8])


@pytest.mark.parametrize("train_decay", [False, True])
def test_the_forms_are_one_function_with_one_gradient(train_decay: bool) -> None:
    results = []
    for form in FORMS:
        module = double_module(train_decay=train_decay)
        x = inputs().requires_grad_()
        y, state = module(x, form=form, return_state=True)
        (y.square().sum() + state.square().sum()).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        assert len(gradients) == 2 + train_decay
        results.append([y, state, x.grad, *gradients])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.abs().max() > 0
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_op_serves_the_module_in_every_form(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = MultiScaleRetention(DIM, HEADS, train_decay=True)
    results = []
    for kind, precision in (
        (module, torch.float32),
        (double_module(train_decay=True), torch.float64),
    ):
        x = inputs(precision).requires_grad_()
        state = starting_state().to(precision).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=kind is module):
            name = form if kind is module else "recurrent"
            y, end = kind(x, form=name, state=state, position=3, return_state=True)
        assert y.dtype == (dtype if kind is module else precision)
        assert end.dtype == precision
        (y.to(precision).sum() + end.sum()).backward()
        gradients = [parameter.grad for parameter in kind.parameters()]
        results.append([y.detach(), end.detach(), x.grad, state.grad, *gradients])
    for a, b in zip(*results, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 8, SEQLEN - 1])
def test_a_text_in_two_parts_is_the_whole(form: str, cut: int) -> None:
    module, x = double_module(), inputs()
    whole, last = module(x, form="parallel", return_state=True)
    first, state = module(x[:, :cut], form=form, return_state=True)
    second, end = module(x[:, cut:], form=form, position=cut, state=state, return_state=True)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(end, last, rtol=1e-6, atol=1e-9)
    displaced, _ = module(x[:, cut:], form=form, state=state)
    assert not torch.allclose(displaced, second, rtol=1e-3)


def test_token_by_token_is_the_whole_in_one_state() -> None:
    torch.manual_seed(0)
    module, x = MultiScaleRetention(DIM, HEADS), inputs(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        whole, last = module(x, form="parallel", return_state=True)
        state = torch.zeros_like(last)
        steps = []
        for index in range(SEQLEN):
            y, left = module(
                x[:, index : index + 1],
                form="recurrent",
                position=torch.tensor(index),
                state=state,
                return_state=True,
                inplace_state=True,
            )
            assert left.data_ptr() == state.data_ptr()
            steps.append(y)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0.01, atol=0.003)
    torch.testing.assert_close(state, last, rtol=1e-3, atol=1e-3)


def test_the_normalised_op_gives_the_same_module() -> None:
    results = []
    for kind in (MultiScaleRetention, NormalisedRetention):
        torch.manual_seed(0)
        module = kind(DIM, HEADS, train_decay=True)
        x = inputs(torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.float16):
            answer = module(x)
        y = answer if isinstance(answer, torch.Tensor) else answer[0]
        y.float().square().sum().backward()
        results.append([y, x.grad, module.to_qkvg.weight.grad, module.out.weight.grad])
    for a, b in zip(*results, strict=True):
        assert float((a - b).detach().norm() / b.detach().norm()) < 0.01


def test_a_mask_takes_the_place_of_the_decay_and_can_be_trained() -> None:
    torch.manual_seed(0)
    module, x = NormalisedRetention(DIM, HEADS), inputs(torch.float32)
    mask = decay_mask(None, HEADS, SEQLEN, SEQLEN, x.device).half().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        decayed, masked = module(x), module(x, mask)
        masked.float().square().sum().backward()
    torch.testing.assert_close(masked, decayed, rtol=0.01, atol=0.003)
    assert mask.grad is not None
    assert mask.grad.abs().max() > 0
    assert mask.grad.triu(1).abs().max() == 0
    with pytest.raises(ValueError, match="takes the place of the decay"):
        NormalisedRetention(DIM, HEADS, train_decay=True)(x, mask)


@pytest.mark.parametrize(("dim", "heads"), [(36, 2), (32, 0), (0, 1)])
def test_sizes_that_do_not_fit_are_refused(dim: int, heads: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 8 heads, got {dim} and {heads} heads"):
        MultiScaleRetention(dim, heads)


# --- the model ------------------------------------------------------------------------------------


def tokens(seed: int = 0, seqlen: int = SEQLEN) -> torch.Tensor:
    return torch.randint(256, (2, seqlen), generator=torch.Generator().manual_seed(seed))


def tiny() -> RetNet:
    torch.manual_seed(0)
    return RetNet(TINY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_forms_of_a_model_agree_within_the_rounding_of_the_dtype(dtype: torch.dtype) -> None:
    agreement = compare_forms(tiny(), tokens(), dtype)
    assert agreement.ok, agreement
    assert len(agreement.errors) == 4
    assert 0 < agreement.allowed < 16 * torch.finfo(dtype).eps


def test_a_form_that_forgets_its_state_is_detected() -> None:
    def forgetful(*tensors: Any, **options: Any) -> Any:
        o, state = retention_func(*tensors, **{**options, "output_final_state": True})
        return o, state if state is None else state.zero_()

    model = tiny()
    model.use(forgetful)
    agreement = compare_forms(model, tokens(), torch.bfloat16)
    assert not agreement.ok
    assert agreement.errors["parallel"] <= agreement.allowed < agreement.errors["token by token"]


def test_reading_on_leaves_the_state_and_steps_change_it() -> None:
    model, text = tiny(), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, state = model.read(text[:, :8])
        kept = state.clone()
        rest, end = model.read(text[:, 8:], state)
        assert int(state.position) == 8
        assert int(end.position) == SEQLEN
        assert all(torch.equal(a, b) for a, b in zip(state.layers, kept.layers, strict=True))
        stepped = [model.step(text[:, i : i + 1], state) for i in range(8, SEQLEN)]
    assert int(state.position) == SEQLEN
    torch.testing.assert_close(torch.cat(stepped, dim=1), rest, rtol=0.05, atol=0.02)
    for a, b in zip(state.layers, end.layers, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
    state.copy_(kept)
    assert int(state.position) == 8
    assert torch.equal(state.layers[1], kept.layers[1])


def test_decoding_writes_what_the_whole_text_says_and_leaves_its_start_alone() -> None:
    model = with_rounded_weights(tiny(), torch.bfloat16)
    prompt = tokens()
    first, state = read_prompt(model, prompt, torch.bfloat16)
    chosen, logits = Decoder(model, state, first, torch.bfloat16).run(5)
    again, _ = Decoder(model, state, first, torch.bfloat16).run(5)
    assert torch.equal(chosen, again)
    assert torch.equal(logits.argmax(-1), chosen)
    assert int(state.position) == SEQLEN
    text = torch.cat((prompt, first, chosen[:, :-1]), dim=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = model(text)[:, SEQLEN:]
        by_step = logits_by_step(model, text)[:, SEQLEN:]
    for decoded in (logits, by_step):
        assert error_of(decoded, whole) < 4 * torch.finfo(torch.bfloat16).eps


def test_rounded_weights_change_nothing() -> None:
    model, text = tiny(), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(with_rounded_weights(model, torch.bfloat16)(text), model(text))
    assert model.head.weight.dtype == torch.float32


@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_training_learns_in_every_form(form: str) -> None:
    text = torch.arange(2000, dtype=torch.uint8)
    batches = Batches(text, count=10, batch=2, seqlen=16, seed=0, device="cpu")
    config = TrainingConfig(learning_rate=3e-3, warmup_steps=1, form=form)
    torch.manual_seed(0)
    model = RetNet(RetNetConfig(layers=1, dim=DIM, heads=HEADS, hidden=48, train_decay=True))
    logits = dict(model.named_parameters())["blocks.0.retention.decay_logits"]
    before = logits.detach().clone()
    losses = train(model, config, batches)
    assert losses[-1] < losses[0] - 0.2
    assert not torch.equal(logits.detach(), before)


@pytest.mark.parametrize(
    ("dim", "layers", "message"),
    [(36, 2, "multiple of 8 heads, got 36"), (32, 0, "layers must be at least 1, got 0")],
)
def test_a_model_whose_sizes_do_not_fit_is_refused(dim: int, layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetNetConfig(dim=dim, heads=2, layers=layers)


# --- the whole script -----------------------------------------------------------------------------


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(20):
        text = f"value = {number}\n" * 20
        (folder / f"module{number:02}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(script, "read_corpus", lambda: read_corpus(folder))


@pytest.mark.usefixtures("small_corpus")
def test_the_script_trains_compares_decodes_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert train_retnet.main([*ARGUMENTS, "--train-decay", "--out", str(out)]) == 0
    assert "agrees: yes" in capsys.readouterr().out
    report = json.loads((out / "train_retnet.json").read_text(encoding="utf-8"))
    assert report["ok"] is True
    assert report["environment"]["torch"] == torch.__version__
    assert len(report["losses"]) == 3
    assert set(report["agreement"]["errors"]) == {*FORMS, "token by token"}
    assert report["decoding"]["same_text"] is None
    assert report["decoding"]["state_bytes"] == 2 * 2 * 2 * 16 * 32 * 4  # layers, batch, heads
    assert report["decoding"]["step_ms"]["eager"] > 0


@pytest.mark.usefixtures("small_corpus")
def test_the_script_fails_when_a_form_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*tensors: Any, **options: Any) -> Any:
        o, state = retention_func(*tensors, **options)
        # A factor would vanish in the norm of the heads.
        return o.roll(1, dims=-1) if options["form"] == "parallel" else o, state

    class Wrong(RetNet):
        def __init__(self, config: RetNetConfig) -> None:
            super().__init__(config, wrong)

    monkeypatch.setattr(train_retnet, "RetNet", Wrong)
    assert train_retnet.main(ARGUMENTS) == 1
    assert "agrees: NO" in capsys.readouterr().out


@pytest.mark.usefixtures("small_corpus")
def test_sizes_that_cannot_be_end_the_script_with_their_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_retnet.main([*ARGUMENTS, "--heads", "3"]) == 2
    assert "dim must be a multiple of 8 heads, got 32, 3" in capsys.readouterr().err
