"""What a checkpoint keeps of a model: its parameters and persistent buffers under original names, and how they are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError
from slapo_core.gather import original_keys
from slapo_core.parameters import is_part, shard_spec
from slapo_training.pieces import Piece, piece_of

from .replica_spec import in_replica, joined, replica_spec

Tensors = dict[str, torch.Tensor]

_CUT = ("dim", "full_shape", "rank", "num_shards", "blocks", "axis", "dealt")


def parameters(module: nn.Module) -> Tensors:
    """Parameters by their first name in the unmodified model, a tied one once."""
    return _by_first_name(module.named_parameters())


def buffers(module: nn.Module) -> Tensors:
    """Persistent buffers by their first name in the unmodified model, a shared one once."""
    held: dict[int, tuple[str, torch.Tensor]] = {}
    for path, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                held.setdefault(id(buffer), (f"{path}.{name}" if path else name, buffer))
    return _by_first_name(held.values())


def pieces(module: nn.Module) -> dict[str, Piece]:
    """What this rank holds of the parameters and persistent buffers, under the names of ``parameters`` and ``buffers``."""
    return {name: piece(tensor, tensor) for name, tensor in {**parameters(module), **buffers(module)}.items()}


def piece(tensor: torch.Tensor, value: torch.Tensor) -> Piece:
    """Where a tensor of a parameter's shape on this rank lies in the whole one.

    Args:
        tensor: The parameter or buffer.
        value: Itself, or what an optimizer keeps for each of its elements.
    """
    spec = replica_spec(tensor)
    if spec is None:
        return piece_of(value, shard_spec(tensor))
    return piece_of(value, spec.inner, in_replica(tensor).shape, spec.rows())


def _by_first_name(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    tensors = dict(named)
    return {keys[0]: tensors[name] for name, keys in original_keys(tensors.items()).items()}


def packed(tensors: Tensors) -> dict[str, Any]:
    """What is written of these tensors. Collective over the replicas, where they share tensors out."""
    return {
        "tensors": {name: joined(tensor, tensor.detach()) for name, tensor in tensors.items()},
        "cuts": {name: _cut(in_replica(tensor)) for name, tensor in tensors.items()},
    }


def check_same(tensors: Tensors, saved: Mapping[str, Any]) -> None:
    """Refuse what was not packed from the same tensors, cut alike.

    Raises:
        BuildError: other names, shapes or types; another shard, which may have the same shape.
    """
    if odd := sorted(set(tensors) ^ set(saved["tensors"])):
        where = "checkpoint" if odd[0] in tensors else "engine"
        raise BuildError(f"{odd[0]!r} is not in the {where}; load it into the model and stages it was saved from")
    for name, tensor in ((name, in_replica(tensor)) for name, tensor in tensors.items()):
        if (own := _cut(tensor)) != (cut := saved["cuts"][name]):
            raise BuildError(
                f"{name!r} is {_described(cut)} in the checkpoint, but {_described(own)} in the engine; "
                "load it into a schedule that shards alike"
            )
        there, here = (f"shape {tuple(each.shape)} and type {each.dtype}" for each in (saved["tensors"][name], tensor))
        if there != here:
            raise BuildError(
                f"{name!r} has {there} in the checkpoint, {here} in the engine; load it into the model it was saved from"
            )


@torch.no_grad()
def put(tensors: Tensors, saved: Mapping[str, Any]) -> None:
    """Write what was saved into the tensors."""
    for name, tensor in tensors.items():
        spec, whole = replica_spec(tensor), saved["tensors"][name]
        tensor.copy_(spec.cut(whole) if spec is not None else whole)


def _cut(tensor: torch.Tensor) -> dict[str, Any] | None:
    """How this rank's part was cut from the full tensor; None for a whole one."""
    spec = shard_spec(tensor)
    return {key: value for key in _CUT if (value := getattr(spec, key)) is not None} if is_part(tensor) else None


def _described(cut: dict[str, Any] | None) -> str:
    return f"sharded with {', '.join(f'{key}={value}' for key, value in cut.items())}" if cut else "whole"
