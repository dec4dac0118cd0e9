"""Code and commands of the pages that are marked for a GPU, after the earlier blocks of their pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention_autotuner import settings
from tests.snippets.pages import CHINESE, Block, blocks, pages
from tests.snippets.running import at_home, run_commands, run_python
from tests.snippets.shell import LANGUAGES

pytestmark = pytest.mark.gpu

PAGE_BLOCKS = {page: blocks(page) for page in pages() if page != CHINESE}
PYTHON = {
    page: [block for block in page_blocks if block.language == "python" and block.kind != "file"]
    for page, page_blocks in PAGE_BLOCKS.items()
}
COMMANDS = [
    block
    for page_blocks in PAGE_BLOCKS.values()
    for block in page_blocks
    if block.language in LANGUAGES and block.kind == "gpu"
]


@pytest.mark.parametrize(
    "page", [page for page in PAGE_BLOCKS if PYTHON[page]], ids=lambda p: p.name
)
def test_python_runs_on_a_gpu_in_the_order_of_the_page(page: Path, tmp_path: Path) -> None:
    cache = settings.current().cache_dir
    with at_home(tmp_path, cache=cache), settings.override(budget_seconds=10.0):
        run_python(PYTHON[page], gpu=True)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.where)
def test_commands_run_on_a_gpu(block: Block, tmp_path: Path) -> None:
    cache = settings.current().cache_dir
    with at_home(tmp_path, cache=cache), settings.override(budget_seconds=10.0):
        for command, printed in run_commands(block):
            # The output has times, which differ from run to run.
            if command.output is not None:
                assert printed, command.text
