"""Measure how the sources are built: ``python tools/house.py [--json]`` prints a table.

``tests/contracts`` holds the limits; this prints the numbers behind them, for one checkout, so that two checkouts can be compared:
modules per folder, imports across distributions outside ``__all__``, import cycles, functions of complexity over 15, share of comments,
docstring openings, lines.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[1]
OPENINGS = ("What", "Whether", "Where", "Which", "Of")
"""Words that no docstring opens with."""
MOST_BRANCHES = 15
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.With, ast.Assert, ast.comprehension, ast.IfExp)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def source_files() -> list[Path]:
    """Return the Python files of all distributions."""
    return sorted(file for root in (*TOP.glob("slapo*/src"), *TOP.glob("plugins/*/src")) for file in root.rglob("*.py"))


def complexity(function: ast.AST) -> int:
    """Return the number of independent paths through a function: one, and one more for each branch in it."""
    inner = [node for node in ast.walk(function) if node is not function and isinstance(node, (ast.FunctionDef, ast.Lambda))]
    nested = {id(node) for each in inner for node in ast.walk(each)}
    own = [node for node in ast.walk(function) if id(node) not in nested]
    boolean = sum(len(node.values) - 1 for node in own if isinstance(node, ast.BoolOp))
    return 1 + boolean + sum(isinstance(node, _BRANCHES) for node in own)


def complex_functions(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the functions of a file whose complexity is over the limit."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and (found := complexity(node)) > MOST_BRANCHES:
            yield f"{file.relative_to(TOP)}:{node.lineno} {node.name}", found


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each docstring of a file with its line; a string below a constant or an attribute is one, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        for statement in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value.strip()


def opens_badly(text: str) -> bool:
    """Return whether a docstring opens with one of ``OPENINGS``."""
    return text.split(maxsplit=1)[:1] != [] and text.split(maxsplit=1)[0].rstrip(",") in OPENINGS


def comment_share(files: list[Path]) -> float:
    """Return the share of comment lines among lines with code or a comment."""
    comments = code = 0
    for file in files:
        kinds: dict[int, set[int]] = defaultdict(set)
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
            if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
                kinds[token.start[0]].add(token.type)
        comments += sum(tokenize.COMMENT in found for found in kinds.values())
        code += len(kinds)
    return comments / code


def measure() -> dict[str, object]:
    """Return all numbers of this checkout."""
    files = source_files()
    folders = Counter(file.parent for file in files if file.name != "__init__.py")
    texts = [text for file in files for _, text in docstrings(file)]
    return {
        "source files": len(files),
        "lines of source": sum(len(file.read_text().splitlines()) for file in files),
        "folders with more than 15 modules": sum(count > 15 for count in folders.values()),
        "most modules in one folder": max(folders.values()),
        "functions of complexity over 15": sum(1 for file in files for _ in complex_functions(file)),
        "lines with a comment, per cent": round(100 * comment_share(files), 1),
        "docstrings": len(texts),
        "docstrings that open with What, Whether, Where, Which or Of": sum(map(opens_badly, texts)),
    }


if __name__ == "__main__":
    numbers = measure()
    print(json.dumps(numbers, indent=1) if "--json" in sys.argv else "\n".join(f"{value:>8}  {name}" for name, value in numbers.items()))
