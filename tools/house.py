"""Measure how the sources are built: ``python tools/house.py [--json]`` prints a table.

``tests/contracts`` holds the limits. This prints the numbers behind them, so that two checkouts can be compared: modules per
folder, functions of complexity over 15, share of comments, docstring openings, lines.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[1]
OPENINGS = ("What", "Whether", "Where", "Which", "Of")
"""Words that no docstring opens with."""
MOST_BRANCHES = 15


def source_files() -> list[Path]:
    """Return the Python files of all distributions."""
    return sorted(file for root in (*TOP.glob("slapo*/src"), *TOP.glob("plugins/*/src")) for file in root.rglob("*.py"))


def complex_functions() -> list[str]:
    """Return the functions whose cyclomatic complexity is over the limit, as ruff's rule C901 counts it."""
    limit = f"lint.mccabe.max-complexity={MOST_BRANCHES}"
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "C901",
        "--config",
        limit,
        "--output-format",
        "json",
        "--exit-zero",
    ]
    found = json.loads(subprocess.run([*ruff, *map(str, source_files())], capture_output=True, text=True, check=True).stdout)
    return [f"{each['filename']}:{each['location']['row']} {each['message']}" for each in found]


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each docstring of a file with its line; a string below a constant or an attribute is one, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        body = node.body if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) else ()
        values = [statement.value for statement in body if isinstance(statement, ast.Expr)]
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value.strip()


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
        "functions of complexity over 15": len(complex_functions()),
        "lines with a comment, per cent": round(100 * comment_share(files), 1),
        "docstrings": len(texts),
        "docstrings that open with What, Whether, Where, Which or Of": sum(map(opens_badly, texts)),
    }


if __name__ == "__main__":
    numbers = measure()
    print(
        json.dumps(numbers, indent=1)
        if "--json" in sys.argv
        else "\n".join(f"{value:>8}  {name}" for name, value in numbers.items())
    )
