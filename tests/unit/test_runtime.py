"""The tables of a process: every kind of state has one, they are emptied together, and restored after a fresh block."""

from __future__ import annotations

import ast
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import attention_autotuner.api
import attention_autotuner.cli  # noqa: F401  # the import registers its tables
from attention_autotuner.api.shared import plain
from attention_autotuner.core import memo
from attention_autotuner.core.memo import Table, remembered
from attention_autotuner.serving import dispatch, runtime
from attention_autotuner.settings import Settings
from tests.unit.test_layers import MODULES

PERMANENT = {"captured", "driver", "kernels.loaded", "policies.named", "policies.names"}


@pytest.fixture
def table() -> Iterator[Table[str, int]]:
    yield Table("toys.numbers", bound=3)
    del memo.TABLES["toys.numbers"]


def test_every_kind_of_state_has_a_table() -> None:
    tables = memo.TABLES
    plans = {
        f"plans.{op}.{direction}"
        for op in ("attention", "retnet", "retention")
        for direction in ("forward", "backward")
    }
    assert tables.keys() >= PERMANENT | plans | {
        "bundles.installed",
        "bundles.named",
        "decays",
        "dispatch.decisions",
        "dispatch.environments",
        "dispatch.policies",
        "notices.plain",
        "notices.stale_bundles",
        "policies.detected",
        "policies.measured",
        "policies.probed",
        "toolchain.driver_release",
        "toolchain.found",
    }
    assert {name for name, table in tables.items() if table.permanent} == PERMANENT


def test_a_table_drops_its_oldest_entry_at_its_bound(table: Table[str, int]) -> None:
    for number, name in enumerate("abcd"):
        table.remember(name, number)
    assert table == {"b": 1, "c": 2, "d": 3}
    table.remember("c", 9)
    assert table == {"b": 1, "c": 9, "d": 3}


def test_a_name_belongs_to_one_table(table: Table[str, int]) -> None:
    with pytest.raises(ValueError, match=r"toys\.numbers"):
        Table(table.name)


def test_forgetting_by_name(table: Table[str, int]) -> None:
    other = memo.TABLES["decays"]
    with runtime.fresh():
        table.remember("a", 1)
        other.remember("kept", 1)
        runtime.forget("toys")
        assert not table
        assert other
        runtime.forget()
        assert not other
    with pytest.raises(KeyError, match="no table is called toy;"):
        runtime.forget("toy")


def test_permanent_tables_keep_their_entries() -> None:
    try:
        kept: Table[str, int] = Table("toys.kept", permanent=True)
        kept.remember("a", 1)
        runtime.forget("toys")
        with runtime.fresh():
            assert kept == {"a": 1}
            kept.remember("b", 2)
        assert kept == {"a": 1, "b": 2}
    finally:
        del memo.TABLES["toys.kept"]


def test_what_was_remembered_is_restored_after_a_fresh_block(table: Table[str, int]) -> None:
    table.remember("a", 1)
    with runtime.fresh():
        assert not table
        table.remember("b", 2)
    assert table == {"a": 1}


def test_results_are_remembered_and_errors_are_not() -> None:
    serial = itertools.count()

    @remembered("toys.calls")
    def call(limit: int) -> int:
        number = next(serial)
        if number < limit:
            raise ValueError(number)
        return number

    try:
        with pytest.raises(ValueError, match="0"):
            call(1)
        assert (call(1), call(1), call(0)) == (1, 1, 2)
        runtime.forget("toys.calls")
        assert call(1) == 3
    finally:
        del memo.TABLES["toys.calls"]


def test_forgotten_decisions_make_plans_out_of_date(tmp_path: Path) -> None:
    with runtime.fresh():
        before = dispatch.generation()
        runtime.forget("dispatch.decisions")
        assert dispatch.generation() > before
        inside = dispatch.generation()
    assert dispatch.generation() > inside
    assert Settings(cache_dir=tmp_path) not in memo.TABLES["dispatch.decisions"]


def test_a_notice_is_logged_again_once_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    with runtime.fresh(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            plain.notice("only this")
        runtime.forget("notices")
        plain.notice("only this")
    assert [record.message for record in caplog.records] == ["only this"] * 2


@pytest.mark.parametrize("name", MODULES)
def test_no_module_keeps_private_state(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        constant = ast.unparse(target).isupper()
        empty = ast.unparse(node.value) in ("{}", "[]", "set()", "dict()", "list()")
        assert constant or not empty, f"{name}, line {node.lineno}: use a Table of core.memo"


def test_no_test_clears_a_cache(repository: Path) -> None:
    for path in (repository / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Attribute) and node.attr == "cache_clear"), path
