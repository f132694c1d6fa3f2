"""The code stays in pieces that a person can read."""

from __future__ import annotations

import ast
import io
import tokenize
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


def code_lines(file: Path) -> int:
    """Lines that are neither blank nor comment nor docstring, nor the list of public names."""
    text = file.read_text()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in skipped]
    strings = [
        node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    public = [
        node for node in ast.parse(text).body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    documentation = {line for node in (*strings, *public) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documentation)


def test_core_stays_small() -> None:
    core = SOURCES["slapo-core"] / "slapo_core"
    counts = {str(file.relative_to(core)): code_lines(file) for file in core.rglob("*.py")}
    assert sum(counts.values()) <= 2500, counts


@pytest.mark.parametrize(("name", "limit"), [("plugins.py", 200), ("plugin.py", 40)])
def test_plugin_loading_and_registrars_are_short(name: str, limit: int) -> None:
    found = {str(file.relative_to(TOP)): lines(file) for file in FILES if file.name == name}
    assert found
    assert {path: count for path, count in found.items() if count > limit} == {}


DOCUMENTED_PATH = Path("slapo/src/slapo/utils/common.py")
"""Classic scripts import ``slapo.utils.common``; it holds names of files that say what they are, and nothing else."""


def test_no_file_is_called_after_nothing() -> None:
    named = [file.relative_to(TOP) for file in FILES if file.stem in ("utils", "common", "helpers", "misc")]
    assert named == [DOCUMENTED_PATH]
    tree = ast.parse((TOP / DOCUMENTED_PATH).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_package_is_typed_and_not_a_namespace(name: str) -> None:
    package = SOURCES[name] / name.replace("-", "_")
    assert (package / "py.typed").exists()
    code = [folder for folder in [package, *package.rglob("*")] if folder.is_dir() and list(folder.glob("*.py"))]
    assert [str(folder) for folder in code if not (folder / "__init__.py").exists()] == []
