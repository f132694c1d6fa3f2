"""Paths of modules in models with repeated blocks."""

from __future__ import annotations

from collections.abc import Iterator


def without_block_numbers(path: str) -> str:
    """Return a path with ``*`` for each block number: the same for corresponding modules of all blocks."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def ancestors(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module or parameter, innermost first; the model's own is empty."""
    while path:
        path = path.rpartition(".")[0]
        yield path
