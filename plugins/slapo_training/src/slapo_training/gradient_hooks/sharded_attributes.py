"""Tensors that users keep as attributes of a parameter, such as a mask, cut as the parameter is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

CUT = "_slapo_cut_attributes"
"""Attribute of a part: the names of those of its attributes that were cut with it."""


def shard_attributes(
    part: torch.Tensor, shape: Sequence[int], dim: int, cut: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Let a part of a parameter have the matching part of each tensor that was an attribute of the parameter.

    Args:
        part: The part, which has the attributes of the parameter.
        shape: Shape of the parameter. A tensor matches that has as many dimensions, each of the same size or of size 1.
        dim: Dimension along which the parameter was cut; what has size 1 there stays as it is.
        cut: Makes the part of a tensor.

    Returns:
        The tensors as they were, by name.
    """
    found = {
        name: value for name, value in vars(part).items() if is_shaped_like(value, shape) and value.shape[dim] == shape[dim]
    }
    vars(part).update({name: cut(value.detach()) for name, value in found.items()})
    if found:
        vars(part)[CUT] = {*vars(part).get(CUT, ()), *found}
    return found


def attributes_cut_with(part: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that were cut with a part, by name, each expanded to the shape of the part."""
    own = vars(part)
    tensors = {name: own.get(name) for name in sorted(own.get(CUT, ()))}  # users may have put something else there
    return {name: value.expand(part.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def is_shaped_like(value: object, shape: Sequence[int]) -> bool:
    """Return whether a value is a tensor of a parameter's shape, or of size 1 along some dimensions."""
    if type(value) is not torch.Tensor or value.dim() != len(shape) or not shape:
        return False
    return all(own in (1, size) for own, size in zip(value.shape, shape, strict=True))
