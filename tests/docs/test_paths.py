"""Files that the documents name exist, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "hybridc|passes|schedules|models|tests|benchmarks|docs"
NAMED = re.compile(rf"`((?:{FOLDERS})/[a-z\d_./]*?)`")
"""Names in capitals stand for others."""
FILE = re.compile(r"`(\w+\.(?:py|cpp|cc|h))`")
"""A file that is named without its folder."""
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_and_links_exist(document: Path) -> None:
    text = document.read_text()
    missing = [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    missing += [
        link for link in LINK.findall(text) if "://" not in link and not (document.parent / link).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_without_their_folder_exist_somewhere(document: Path) -> None:
    present = {path.name for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.*")}
    assert [name for name in FILE.findall(document.read_text()) if name not in present] == []
