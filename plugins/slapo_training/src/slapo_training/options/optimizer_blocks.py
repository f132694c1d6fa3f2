"""Blocks of fused parameters that an optimizer steps as separate tensors: the option ``optimizer_blocks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from slapo_core import BuildError


class OptimizerBlocks(NamedTuple):
    """Blocks of a fused parameter, of these sizes along the dimension in which they are concatenated."""

    dim: int
    sizes: tuple[int, ...]


def check_blocks(given: Any) -> None:
    """Raise ``BuildError`` unless given None or a mapping of globs to a dimension and a number of blocks or their sizes."""
    if given is None:
        return
    pairs: list[tuple[Any, Any]] = list(given.items()) if isinstance(given, Mapping) else [("", None)]
    for pattern, value in pairs:
        is_pair = isinstance(pattern, str) and isinstance(value, list | tuple) and len(value) == 2 and type(value[0]) is int
        number = value[1] if is_pair else None
        sizes = [number] if type(number) is int else number
        if not (isinstance(sizes, list | tuple) and sizes and all(type(size) is int and size > 0 for size in sizes)):
            raise BuildError(
                f"optimizer_blocks is {given!r}; give globs of names of parameters, and of each (dim, number of blocks), e.g. "
                "{'*.c_attn.weight': (1, 3)}"
            )


def blocks_of(
    given: Mapping[str, tuple[int, int | Sequence[int]]] | None, shapes: Mapping[str, Sequence[int]]
) -> dict[str, OptimizerBlocks]:
    """Return the blocks of each parameter that the option names by globs, given the shapes of the whole parameters.

    Raises:
        BuildError: a parameter cannot be split into these blocks.
    """
    found: dict[str, OptimizerBlocks] = {}
    for pattern, (dim, number) in (given or {}).items():
        for name, shape in shapes.items():
            if not fnmatchcase(name, pattern):
                continue
            size = shape[dim] if -len(shape) <= dim < len(shape) else 0
            count = number if isinstance(number, int) else len(number)
            sizes = tuple(number) if not isinstance(number, int) else (size // count,) * count
            if not size or sum(sizes) != size:
                raise BuildError(
                    f"optimizer_blocks[{pattern!r}] is {(dim, number)}, and {name!r} of shape {tuple(shape)} cannot be cut so; "
                    "give a dimension and the number of equal blocks along it, or sizes that add up"
                )
            found[name] = OptimizerBlocks(dim % len(shape), sizes)
    return found
