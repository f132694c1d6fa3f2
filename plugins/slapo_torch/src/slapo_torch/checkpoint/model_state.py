"""State of a model in checkpoints: its parameters and persistent buffers under original names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from slapo_core import Program, shard_spec
from slapo_training.ema import MasterValue, buffer_values
from slapo_training.model import Piece, Tensors, buffers, parameters, piece_of, write
from slapo_training.optimizers import Layout

from ..fsdp.replica_spec import replica_spec, replica_tensor


def pieces(module: nn.Module) -> dict[str, Piece]:
    """Return this rank's pieces of the parameters and persistent buffers, under the names of ``parameters`` and ``buffers``."""
    return {name: piece_of_parameter(tensor, tensor) for name, tensor in {**parameters(module), **buffers(module)}.items()}


def master_values(module: nn.Module) -> Iterator[MasterValue]:
    """Iterate over the trained parameters and the buffers of a rank, as they are stepped in place."""
    for name, parameter in parameters(module).items():
        if parameter.requires_grad:
            yield MasterValue(name, parameter, piece_of_parameter(parameter, parameter))
    found = buffers(module)
    yield from buffer_values(found, {name: piece_of_parameter(buffer, buffer) for name, buffer in found.items()})


def piece_of_parameter(tensor: torch.Tensor, value: torch.Tensor) -> Piece:
    """Where a tensor of a parameter's shape on this rank lies in the whole one.

    Args:
        tensor: The parameter or buffer.
        value: Itself, or what an optimizer keeps for each of its elements.
    """
    spec = replica_spec(tensor)
    if spec is None:
        return piece_of(value, shard_spec(tensor))
    return piece_of(value, spec.inner, replica_tensor(tensor).shape, spec.rows())


def parameter_layout(program: Program, module: nn.Module) -> Layout:
    """Return the layout of this rank's parameters, for an optimizer that may step whole tensors."""
    parts = Layout.of_engine(program, module, None, is_flat=False)
    return replace(parts, piece=lambda parameter: piece_of_parameter(parameter, parameter))  # FSDP has rows of parts


def differences(pieces: Mapping[str, Piece], saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Iterator[str]:
    """What of a model is in a checkpoint with another shape or type.

    Args:
        pieces: This rank's.
        saved: Shape and type of what there is, by name.
    """
    for name in pieces.keys() & saved.keys():
        held = pieces[name]
        there, here = (f"shape {shape} and type {kind}" for shape, kind in (saved[name], (held.full_shape, held.tensor.dtype)))
        if there != here:
            yield f"{name!r} has {there} in the checkpoint, {here} in the engine"


def restore(tensors: Tensors, read: Mapping[str, torch.Tensor]) -> None:
    """Write what was read into the tensors."""
    for name, tensor in tensors.items():
        write(tensor, read[name])
