"""Tensor attributes of parameters, e.g. a mask, sharded like the parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

CUT = "_slapo_cut_attributes"
"""Attribute of a shard with the names of its attributes that were sharded with it."""


def shard_attributes(
    part: torch.Tensor, shape: Sequence[int], dim: int, cut: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Shard the tensor attributes of a parameter's shard in place; return the whole tensors by name.

    Args:
        part: The shard, with the attributes of the whole parameter.
        shape: Shape of the whole parameter. A tensor matches if each of its sizes is the same or 1.
        dim: Sharded dimension; tensors of size 1 along it do not change.
    """
    found = {
        name: value for name, value in vars(part).items() if is_shaped_like(value, shape) and value.shape[dim] == shape[dim]
    }
    vars(part).update({name: cut(value.detach()) for name, value in found.items()})
    if found:
        vars(part)[CUT] = {*vars(part).get(CUT, ()), *found}
    return found


def attributes_cut_with(part: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensor attributes that were sharded with a shard, by name, each expanded to the shard's shape."""
    own = vars(part)
    tensors = {name: own.get(name) for name in sorted(own.get(CUT, ()))}  # users may have replaced an attribute
    return {name: value.expand(part.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def is_shaped_like(value: object, shape: Sequence[int]) -> bool:
    """Return True for a tensor of a parameter's shape, or with size 1 along some dimensions."""
    if type(value) is not torch.Tensor or value.dim() != len(shape) or not shape:
        return False
    return all(own in (1, size) for own, size in zip(value.shape, shape, strict=True))
