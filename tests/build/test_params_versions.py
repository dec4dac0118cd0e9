"""Attention's params of older versions of the ABI are the first fields of the present ones, at the same places."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from attention_autotuner.core import abi
from tests.cpp_mirror import compile_host

pytestmark = pytest.mark.build

# Of each version, the first field that a later one added; 1003 added none to the backward, 1006 is the present forward.
ADDED: dict[type[ctypes.Structure], dict[int, str]] = {
    abi.AttentionForwardParams: {
        1002: "seqlens_k",
        1003: "window_left",
        1004: "cu_seqlens_q",
        1005: "bias_table",
    },
    abi.AttentionBackwardParams: {
        1002: "window_left",
        1004: "cu_seqlens_q",
        1005: "bias_table",
        1006: "dattn_mask",
    },
}
PROGRAM = """
#include <cstdio>
#include <attention_autotuner/score/score_mod.cuh>
template <typename Params, typename Field>
void place(Params const& params, Field const& field) {
  auto const begin = reinterpret_cast<char const*>(&params), at = reinterpret_cast<char const*>(&field);
  std::printf("%%d %%d\\n", int(at - begin), int(sizeof(field)));
}
int main() {
%s
}
"""


def test_older_params_are_prefixes_of_the_present_ones(tmp_path: Path) -> None:
    lines, expected = [], []
    for struct, versions in ADDED.items():
        for version, following in versions.items():
            size = getattr(struct, following).offset
            name = f"attention_autotuner::{struct.__name__}{version}"
            lines.append(f'{{ {name} p{{}}; std::printf("%d\\n", int(sizeof(p)));')
            expected.append(str(size))
            for field, *_ in struct._fields_:
                place = getattr(struct, field)
                if place.offset < size:
                    lines.append(f"place(p, p.{field});")
                    expected.append(f"{place.offset} {place.size}")
            lines.append("}")
    result = compile_host(tmp_path, PROGRAM % "\n".join(lines))
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stdout + result.stderr
    ran = subprocess.run([tmp_path / "traits"], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == expected
