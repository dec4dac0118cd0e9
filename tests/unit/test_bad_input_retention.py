"""Bad input of retnet_attn_func and retention_func: each row a typed error that names constraint and value."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import Decay, retention_func, retnet_attn_func
from tests.bad_calls import Row, calling, check_refusal, parametrize, t

# As an untyped caller sees them.
retain: Callable[..., Any] = retention_func
retnet_attn: Callable[..., Any] = retnet_attn_func

Q, V = t(2, 2, 6, 16), t(2, 2, 6, 24)
MASK = t(2, 6, 6)
STATE = t(2, 2, 16, 24, dtype=torch.float32)
retnet = calling(retnet_attn_func, Q, Q, V, MASK)
retention = calling(retention_func, Q, Q, V)
ARRAYS = [np.zeros(x.shape, np.float16) for x in (Q, Q, V)]
FROZEN = np.zeros(STATE.shape, np.float32)
FROZEN.flags.writeable = False


def mask(value: Any, **options: Any) -> Callable[[], object]:
    return retnet({3: value}, **options)


def of_arrays(**options: Any) -> Callable[[], object]:
    return lambda: retain(*ARRAYS, **options)


RETNET: list[Row] = [
    ("no mask", mask(None), "mask must be a tensor or a Decay", "None"),
    ("a name as mask", mask("causal"), "mask must be a tensor or a Decay", "'causal'"),
    ("a number as mask", mask(0.9), "mask must be a tensor or a Decay", "0.9"),
    ("a list as mask", mask([[1.0]]), "mask must be a tensor or a Decay", "[[1.0]]"),
    ("the class Decay", mask(Decay), "pass an instance", "Decay"),
    ("the class Tensor", mask(torch.Tensor), "mask must be a tensor", "torch.Tensor"),
    ("boolean mask", mask(MASK.bool()), "q's dtype torch.float16", "torch.bool"),
    ("fp32 mask", mask(MASK.float()), "q's dtype torch.float16", "torch.float32"),
    ("4-d mask", mask(MASK[None]), "mask must be [2 or 1, 6, 6]", "[1, 2, 6, 6]"),
    ("2-d mask", mask(MASK[0]), "mask must be [2 or 1, 6, 6]", "[6, 6]"),
    ("heads of mask", mask(t(3, 6, 6)), "mask must be [2 or 1, 6, 6]", "[3, 6, 6]"),
    ("keys of mask", mask(t(2, 6, 5)), "mask must be [2 or 1, 6, 6]", "[2, 6, 5]"),
    ("mask on meta", mask(MASK.to("meta")), "mask must be on q's device", "meta"),
    ("stride of mask", mask(t(2, 6, 12)[..., ::2]), "mask must have unit stride", "got 2"),
    ("sparse mask", mask(MASK.to_sparse()), "mask must be a dense", "sparse"),
    ("array as mask", mask(np.zeros((2, 6, 6), "f2")), "arrays of one library", "ndarray"),
    ("mask backwards", lambda: retnet_attn(*ARRAYS, np.zeros((2, 6, 6), "f2")[:, ::-1]),
     "mask must have no negative stride", "-12"),
    ("scale str", retnet(scale="1"), "scale must be a float", "'1'"),
    ("scale None", retnet(scale=None), "scale must be a float", "None"),
    ("scale nan", retnet(scale=math.nan), "scale must be finite in fp32", "nan"),
    ("scale np inf", retnet(scale=np.float32("inf")), "scale must be finite in fp32", "inf"),
    ("r_clamp_max 0.5", retnet(r_clamp_max=0.5), "r_clamp_max must be at least 1", "0.5"),
    ("r_clamp_max nan", retnet(r_clamp_max=math.nan), "r_clamp_max must be at least 1", "nan"),
    ("r_clamp_max str", retnet(r_clamp_max="4"), "r_clamp_max must be a float or None", "'4'"),
    ("r_grad alone", retnet(normalize=False, r_grad=True), "leaves no r", "r_grad=True"),
    ("clamp alone", retnet(normalize=False, r_clamp_max=4.0), "leaves no r", "r_clamp_max=4.0"),
    ("causal 1", retnet(causal=1), "causal must be True or False", "1"),
    ("normalize None", retnet(normalize=None), "normalize must be True or False", "None"),
    ("r_grad 0", retnet(r_grad=0), "r_grad must be True or False", "0"),
    ("return_r 'r'", retnet(return_r="r"), "return_r must be True or False", "'r'"),
    ("retnet layout", retnet(layout="bdsh"), "layout must be one of", "'bdsh'"),
    ("retnet head_first", retnet(head_first=True), "head_first: it must be False", "True"),
    ("retnet misspelt", retnet(normalise=False), "did you mean normalize?", "normalise=False"),
    ("retnet device", retnet(None, "B300"), "unknown device_type", "B300"),
    ("retnet dtype", retnet({0: Q.float()}), "q must be float16 or bfloat16", "float32"),
    ("decay 2", mask(Decay(2.0)), "gamma must lie in (0, 1]", "2.0"),
    ("decay too few", mask(Decay([0.5])), "one value for each of 2 heads", "got 1"),
    ("decay of a Decay", mask(Decay(Decay())), "gamma must be None, a number", "Decay"),
    ("decay with gradient", mask(Decay(torch.full((2,), 0.5, requires_grad=True))),
     "has no gradient", "requires_grad=True"),
    ("decay, q a list", retnet({0: [1.0], 3: Decay()}), "arrays of one library", "list"),
]  # fmt: skip
GAMMAS: list[Row] = [
    (f"gamma {type(gamma).__name__} {text}", retention(None, gamma), constraint, text)
    for gamma, constraint, text in (
        (0.0, "gamma must lie in (0, 1]", "0.0"),
        (-0.5, "gamma must lie in (0, 1]", "-0.5"),
        (1.5, "gamma must lie in (0, 1]", "1.5"),
        (math.nan, "gamma must lie in (0, 1]", "nan"),
        (np.float32(7), "gamma must lie in (0, 1]", "7.0"),
        (10**400, "gamma must lie in (0, 1]", "inf"),
        ([0.5, 3], "gamma must lie in (0, 1]", "3.0 for head 1"),
        ([0.5], "one value for each of 2 heads", "got 1"),
        ([0.5] * 3, "one value for each of 2 heads", "got 3"),
        ((), "one value for each of 2 heads", "got 0"),
        ("0.5", "gamma must be None, a number", "str"),
        (True, "gamma must be None, a number", "bool"),
        ({0: 0.5}, "gamma must be None, a number", "dict"),
        ([[0.5], [0.5]], "gamma must be None, a number", "list for head 0"),
        (torch.ones(3), "gamma must be floats [2]", "[3]"),
        (torch.ones(2, 1), "gamma must be floats [2]", "[2, 1]"),
        (torch.ones(2).long(), "gamma must be floats [2]", "torch.int64"),
        (torch.ones(2) * 1.25, "gamma must lie in (0, 1]", "1.25"),
        (torch.ones(2, device="meta"), "on q's device cpu or on the CPU", "meta"),
        (torch.ones(2).to_sparse(), "gamma must be a dense", "sparse_coo"),
        (np.ones(2)[::-1], "gamma must have no negative stride", "-8"),
        (np.array(["a", "b"]), "cannot be read through DLPack", "gamma (ndarray)"),
    )
]
STATES: list[Row] = [
    (f"state {name}", retention(initial_state=state, **options), constraint, text)
    for name, state, options, constraint, text in (
        ("fp16", STATE.half(), {}, "initial_state must be torch.float32", "torch.float16"),
        ("fp64", STATE.double(), {}, "initial_state must be torch.float32", "torch.float64"),
        ("shape", t(2, 2, 24, 16), {}, "[2, 2, 16, 24]", "[2, 2, 24, 16]"),
        ("rank", STATE[0], {}, "[2, 2, 16, 24]", "[2, 16, 24]"),
        ("meta", STATE.to("meta"), {}, "on q's device cpu", "meta"),
        ("sparse", STATE.to_sparse(), {}, "dense strided", "sparse_coo"),
        ("str", "zeros", {}, "arrays of one library", "str"),
        ("number", 0, {}, "arrays of one library", "int"),
        ("array", np.zeros(STATE.shape, "f4"), {}, "arrays of one library", "ndarray"),
        ("None in place", None, {"inplace_state": True}, "needs an initial_state", "None"),
        ("strided in place", STATE.mT.contiguous().mT, {"inplace_state": True}, "contiguous",
         "(768, 384, 1, 16)"),
        ("expanded in place", STATE[:1, :1].expand(2, 2, 16, 24), {"inplace_state": True},
         "contiguous", "(0, 0, 24, 1)"),
        ("with gradient in place", STATE.clone().requires_grad_(), {"inplace_state": True},
         "has no gradient", "requires_grad=True"),
    )
]  # fmt: skip
ARRAYS_OF_STATES: list[Row] = [
    ("read-only", of_arrays(initial_state=FROZEN, inplace_state=True),
     "initial_state must be writable", "read-only ndarray"),
    ("backwards", of_arrays(initial_state=np.zeros(STATE.shape, "f4")[::-1]),
     "initial_state must have no negative stride", "-3072"),
    ("backwards in place",
     of_arrays(initial_state=np.zeros(STATE.shape, "f4")[:, :, ::-1], inplace_state=True),
     "initial_state must have no negative stride", "-96"),
    ("tensor among arrays", of_arrays(initial_state=STATE), "one library", "Tensor"),
    ("fp64 array", of_arrays(initial_state=np.zeros(STATE.shape)), "torch.float32", "float64"),
]  # fmt: skip
RETENTION: list[Row] = [
    ("form", retention(form="serial"), "form must be one of", "'serial'"),
    ("form None", retention(form=None), "form must be one of", "None"),
    ("form list", retention(form=["auto"]), "form must be one of", "['auto']"),
    ("form array", retention(form=np.array(["a", "b"])), "form must be one of", "ndarray [2]"),
    ("output", retention(output_final_state=1), "must be True or False", "1"),
    ("in place", retention(inplace_state="yes"), "inplace_state must be True or False", "'yes'"),
    ("retention layout", retention(layout="tbhd"), "layout must be one of", "'tbhd'"),
    ("retention head_first", retention(head_first=True), "it must be False", "True"),
    ("retention misspelt", retention(initial_sate=STATE), "did you mean initial_state?", "Tensor"),
    ("scale 0", retention(scale=0.0), "scale must be positive and finite", "0.0"),
    ("scale -1", retention(scale=-1), "scale must be positive and finite", "-1.0"),
    ("scale subnormal", retention(scale=1e-40), "scale must be positive and finite", "1e-40"),
    ("retention scale nan", retention(scale=math.nan), "scale must be positive", "nan"),
    ("retention scale str", retention(scale="1"), "scale must be a float or None", "'1'"),
    ("more keys", retention({1: t(2, 2, 7, 16), 2: t(2, 2, 7, 24)}), "as many queries", "6 and 7"),
    ("no keys", retention({1: t(2, 2, 0, 16), 2: t(2, 2, 0, 24)}), "as many queries", "6 and 0"),
    ("65536 sequences", lambda: retain(*[t(1, 1, 1, 8).expand(64, 1024, 1, 8)] * 3),
     "batch * heads_q must be at most 65535", "65536"),
    ("retention device", retention(None, None, "B300"), "unknown device_type", "B300"),
    ("retention dtype", retention({2: V.float()}), "v must be float16 or bfloat16", "float32"),
    ("retention rank", retention({0: Q[0]}), "q must have 4 dimensions", "got 3"),
    ("retention None", retention({0: None}), "arrays of one library", "NoneType"),
]  # fmt: skip


@parametrize([*RETNET, *GAMMAS, *STATES, *ARRAYS_OF_STATES, *RETENTION])
def test_bad_input_is_refused(call: Callable[[], object], constraint: str, value: str) -> None:
    check_refusal(call, constraint, value)


def test_a_read_only_file_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "state"
    np.full(STATE.shape, 2.0, np.float32).tofile(path)
    before = path.read_bytes()
    state = np.memmap(path, np.float32, mode="r", shape=STATE.shape)
    check_refusal(
        of_arrays(initial_state=state, inplace_state=True), "must be writable", "read-only memmap"
    )
    retain(*ARRAYS, initial_state=state)  # reading it is fine
    assert path.read_bytes() == before
    assert (FROZEN == 0).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_limits_do_not_depend_on_the_device(device: str) -> None:
    q = t(1, 1, 1, 8, device=device).expand(65536, 1, 1, 8)
    check_refusal(lambda: retention_func(q, q, q), "at most 65535", "65536")
