"""An author who follows the page on primitives from an empty folder ends up with a working plugin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .conftest import TOP, Environment, pip
from .page_runner import blocks

EXAMPLE = TOP / "plugins" / "slapo_example"
PAGE = TOP / "docs" / "plugins" / "write_a_primitive.md"
FILES = [(block.file, block.content) for block in blocks(PAGE) if block.file][:3]
"""Path and content of the first files that the page tells the author to write: those of the package."""


def test_the_page_shows_the_files_of_the_package() -> None:
    assert [path for path, _ in FILES] == ["pyproject.toml", "src/slapo_example/plugin.py", "src/slapo_example/freeze.py"]
    for path, content in FILES:
        assert (EXAMPLE / path).read_text() == content


def test_it_is_short() -> None:
    lines = [line for path, content in FILES if path.endswith(".py") for line in content.splitlines() if line.strip()]
    assert len(lines) <= 17


def test_following_the_page_shows_the_primitive(tmp_path: Path, installed: Callable[[str], Environment]) -> None:
    """Another test shows what ``slapo`` alone lists: this primitive is not among it."""
    project = tmp_path / "project"
    for path, content in [*FILES, ("src/slapo_example/__init__.py", ""), ("README.md", "")]:
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(content)
    (project / "src/slapo_example/py.typed").touch()
    environment = installed("slapo")
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", project, "-w", tmp_path / "wheel")
    (wheel,) = (tmp_path / "wheel").iterdir()
    pip("install", "-q", "--no-deps", wheel, python=environment.python)
    try:
        assert "freeze" in environment.run("slapo", "primitives")
        rows = json.loads(environment.run("slapo", "plugins", "--json"))["plugins"]
    finally:  # other tests use the environment
        pip("uninstall", "-q", "-y", "slapo-example", python=environment.python)
    (row,) = [row for row in rows if row["name"] == "example"]
    assert row["provides"]["primitives"] == ["freeze"]
    assert "slapo_after_build" in row["provides"]["hooks"]
