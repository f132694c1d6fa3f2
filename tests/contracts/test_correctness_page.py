"""The page of known wrong numbers names tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from .conftest import TOP

PAGE = (TOP / "CORRECTNESS.md").read_text()
ROWS = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE)


@cache
def functions_of(file: str) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((TOP / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_no_kind_is_left_out() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 36))


@pytest.mark.parametrize(("number", "tests"), ROWS)
def test_each_kind_is_held_by_tests_that_exist(number: str, tests: str) -> None:
    named = re.findall(r"`([\w/]+)/(\w+)::(\w+)`", tests)
    assert named
    for folder, module, function in named:
        assert f"test_{function}" in functions_of(f"{folder}/test_{module}.py")


def test_the_readme_leads_there() -> None:
    assert "(CORRECTNESS.md)" in (TOP / "README.md").read_text()
