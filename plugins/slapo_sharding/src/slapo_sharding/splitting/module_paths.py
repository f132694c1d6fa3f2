"""Places in a model, which may be of repeated blocks."""

from __future__ import annotations

from collections.abc import Iterator


def without_block_numbers(path: str) -> str:
    """Return a path without the numbers of blocks: the same for the modules at one place of all of them."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def ancestors(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module or parameter, innermost first; the model's own is empty."""
    while path:
        path = path.rpartition(".")[0]
        yield path
