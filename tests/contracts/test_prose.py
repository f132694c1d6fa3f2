"""Docstrings open as those of a library do: with a verb or a noun, never with a riddle."""

from __future__ import annotations

import pytest

from tools.house import docstrings, opens_badly

from .conftest import TOP

FOLDERS = sorted(
    path.name for path in TOP.iterdir() if path.is_dir() and path.name not in ("build", "dist") and path.name[0] != "."
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_opens_with_a_riddle(folder: str) -> None:
    files = [file for file in (TOP / folder).rglob("*.py") if "build" not in file.parts]
    riddles = [f"{file.relative_to(TOP)}:{line}" for file in files for line, text in docstrings(file) if opens_badly(text)]
    assert riddles == []
