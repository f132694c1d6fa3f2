"""Model state in checkpoints: parameters and persistent buffers under original names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from slapo_core import Program, shard_spec
from slapo_training.ema import MasterValue, buffer_values
from slapo_training.model import Piece, Tensors, buffers, copy_into, parameters, piece_of
from slapo_training.optimizers import ParameterLayout

from ..fsdp.replica_spec import replica_spec, replica_tensor


def pieces(module: nn.Module) -> dict[str, Piece]:
    """Return this rank's pieces of the parameters and persistent buffers, under the names of ``parameters`` and ``buffers``."""
    return {name: piece_of_parameter(tensor, tensor) for name, tensor in {**parameters(module), **buffers(module)}.items()}


def master_values(module: nn.Module) -> Iterator[MasterValue]:
    """Iterate over the trained parameters and buffers of a rank; parameters are their own master values."""
    for name, parameter in parameters(module).items():
        if parameter.requires_grad:
            yield MasterValue(name, parameter, piece_of_parameter(parameter, parameter))
    found = buffers(module)
    yield from buffer_values(found, {name: piece_of_parameter(buffer, buffer) for name, buffer in found.items()})


def piece_of_parameter(tensor: torch.Tensor, value: torch.Tensor) -> Piece:
    """Return this rank's piece of a full tensor: of a parameter or buffer, or of per-element optimizer state of it."""
    spec = replica_spec(tensor)
    if spec is None:
        return piece_of(value, shard_spec(tensor))
    return piece_of(value, spec.inner, replica_tensor(tensor).shape, spec.rows())


def parameter_layout(program: Program, module: nn.Module) -> ParameterLayout:
    """Return the layout of this rank's parameters, for an optimizer that may step whole tensors."""
    parts = ParameterLayout.of_engine(program, module, None, is_flat=False)
    return replace(
        parts, piece=lambda parameter: piece_of_parameter(parameter, parameter)
    )  # FSDP shards rows of tensor-parallel shards


def differences(pieces: Mapping[str, Piece], saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Iterator[str]:
    """Describe the tensors that have another shape or dtype in a checkpoint."""
    for name in pieces.keys() & saved.keys():
        held = pieces[name]
        there, here = (f"shape {shape} and type {kind}" for shape, kind in (saved[name], (held.full_shape, held.tensor.dtype)))
        if there != here:
            yield f"{name!r} has {there} in the checkpoint, {here} in the engine"


def restore(tensors: Tensors, read: Mapping[str, torch.Tensor]) -> None:
    """Copy read values into the tensors of the same names."""
    for name, tensor in tensors.items():
        copy_into(tensor, read[name])
