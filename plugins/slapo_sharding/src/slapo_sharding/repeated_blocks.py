"""Places in a model of repeated blocks."""

from __future__ import annotations


def kind(path: str) -> str:
    """Return a path without the numbers of blocks: the same for the modules at one place of all of them."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))
