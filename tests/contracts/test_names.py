"""A function is named by what it does, a class by what it is: a participle alone says neither."""

from __future__ import annotations

import ast
import re

import pytest

from .conftest import TOP, folders

PARTICIPLE = re.compile(r"_*[A-Za-z][a-z]*(ed|ing)_*")
ALLOWED = {
    "embedding": "a layer, as in torch.nn.functional",
    "training": "an attribute of torch.nn.Module",
    "applied": "of `slapo.ema(engine).applied()`, which users write",
    "agreed": "an attribute that core asks for of functions that fill weights",
    "refused": "`Refused` of the conformance kit, which authors write",
    "seed": "a noun",
    "reseed": "an imperative",
    "speed": "a noun",
}


def participles(source: str) -> list[tuple[int, str]]:
    """Return the line and the name of each function, method and class that is named by one participle."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [(node.lineno, node.name) for node in ast.walk(ast.parse(source)) if isinstance(node, definitions)]
    return [(line, name) for line, name in found if PARTICIPLE.fullmatch(name) and name.strip("_").lower() not in ALLOWED]


@pytest.mark.parametrize("name", sorted(folders()))
def test_no_definition_is_named_by_a_participle(name: str) -> None:
    files = sorted((folders()[name] / ("slapo/src" if name == "slapo" else "src")).rglob("*.py"))
    assert files
    found = {str(file.relative_to(TOP)): participles(file.read_text()) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


def test_participles_are_found() -> None:
    source = (
        "class Compared:\n  def _checked(self): ...\n  def checked_loss(self): ...\nasync def waiting(): ...\ndef seed(): ..."
    )
    assert participles(source) == [(1, "Compared"), (4, "waiting"), (2, "_checked")]
