"""The snippets of ``docs/retention.md``, run in their order as a reader would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

SNIPPET = re.compile(r"^```python(?P<needs> cuda)?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENT = Path("docs") / "retention.md"


def run_snippets(repository: Path, *, cuda: bool) -> int:
    """Run all snippets of the document in one namespace, those for a GPU only where asked; answers how many ran."""
    text = (repository / DOCUMENT).read_text(encoding="utf-8")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    count = 0
    for snippet in SNIPPET.finditer(text):
        if snippet["needs"] and not cuda:
            continue
        # Blank lines before it, so that an error names the line of the document.
        lines = text.count("\n", 0, snippet.start("code"))
        code = compile("\n" * lines + snippet["code"], str(repository / DOCUMENT), "exec")
        exec(code, names)
        count += 1
    return count


def test_the_snippets_run_on_a_cpu(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_snippets(repository, cuda=False) == 6


@pytest.mark.gpu
def test_the_snippets_run_on_a_gpu(repository: Path) -> None:
    assert run_snippets(repository, cuda=True) == 7


def test_files_that_the_document_names_are_there(repository: Path) -> None:
    text = (repository / DOCUMENT).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    for link in links:
        assert (repository / DOCUMENT.parent / link).is_file(), link
