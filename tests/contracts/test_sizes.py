"""The code stays in pieces that a person can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import TOP, folders

SOURCES = {name: folder / ("slapo/src" if name == "slapo" else "src") for name, folder in folders().items()}
FILES = sorted(
    file for folder in [*SOURCES.values(), TOP / "tests", TOP / "benchmarks"] for file in folder.rglob("*.py") if file.is_file()
)


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_no_file_is_over_500_lines() -> None:
    assert [f"{file.relative_to(TOP)}: {lines(file)}" for file in FILES if lines(file) > 500] == []


def test_core_is_at_most_2500_lines_without_its_testing_kit() -> None:
    core = SOURCES["slapo-core"] / "slapo_core"
    counts = {file.relative_to(core): lines(file) for file in core.rglob("*.py") if "testing" not in file.parts}
    assert sum(counts.values()) <= 2500, counts


@pytest.mark.parametrize(("name", "limit"), [("plugins.py", 200), ("plugin.py", 40)])
def test_plugin_loading_and_registrars_are_short(name: str, limit: int) -> None:
    found = {str(file.relative_to(TOP)): lines(file) for file in FILES if file.name == name}
    assert found
    assert {path: count for path, count in found.items() if count > limit} == {}


def test_no_file_is_called_after_nothing() -> None:
    assert [str(file) for file in FILES if file.stem in ("utils", "common", "helpers", "misc")] == []


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_package_is_typed_and_not_a_namespace(name: str) -> None:
    package = SOURCES[name] / name.replace("-", "_")
    assert (package / "py.typed").exists()
    code = [folder for folder in [package, *package.rglob("*")] if folder.is_dir() and list(folder.glob("*.py"))]
    assert [str(folder) for folder in code if not (folder / "__init__.py").exists()] == []
