"""Model state in checkpoints: parameters and persistent buffers under original names, and extra state of modules."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slapo_core import BuildError, Program, shard_spec
from slapo_tracing.graphs import as_original
from slapo_training.checkpoint import StateLoading, check_plain
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
    # FSDP shards rows of tensor-parallel shards
    return replace(parts, piece=lambda parameter: piece_of_parameter(parameter, parameter))


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


def collect_extra(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of each module that has some, by path.

    Raises:
        BuildError: a state has objects that are not plain data.
    """
    states = {path: module.get_extra_state() for path, module in _modules_with_extra_state(model).items()}
    for path, state in states.items():
        check_plain(state, f"the extra state of {path!r}")
    return states


def extra_modules_run(model: nn.Module, stages: nn.Module) -> set[str]:
    """Return the paths of modules with extra state that this rank's stages run."""
    own = {id(module) for module in stages.modules()}
    return {path for path in _modules_with_extra_state(model) if id(model.get_submodule(path)) in own}


def merge_extra(ranks: Sequence[tuple[Mapping[str, Any], set[str]]]) -> dict[str, Any]:
    """Return the extra state of each module, from the first rank of one pipeline that runs the module."""
    found: dict[str, Any] = {}
    for is_run in (True, False):
        for states, paths in ranks:
            for path, state in states.items():
                if not is_run or path in paths:
                    found.setdefault(path, state)
    return found


def extra_for_rank(own: Mapping[str, Any], foreign: Collection[str], merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's extra state on the same layout: its own, or the merged state of modules that other ranks ran.

    Args:
        foreign: Paths of modules that this rank runs now and other ranks ran before.
    """
    return {path: state if path in foreign else own[path] for path, state in merged.items()}


def check_same_extra(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Refuse extra state of other modules.

    Raises:
        BuildError: a module has extra state in the checkpoint only or in the engine only.
    """
    if odd := sorted(set(saved) ^ set(_modules_with_extra_state(model))):
        where = "engine" if odd[0] in saved else "checkpoint"
        raise BuildError(f"the extra state of {odd[0]!r} is not in the {where}; load it into the model it was saved from")


def restore_extra(model: nn.Module, saved: Mapping[str, Any], loading: StateLoading) -> None:
    for path, module in _modules_with_extra_state(model).items():
        now = module.get_extra_state
        loading.load(f"{path!r}", module.set_extra_state, saved[path], lambda now=now: copy.deepcopy(now()))  # type: ignore[misc]


def _modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    modules = {path: as_original(module) for path, module in model.named_modules()}
    return {path: module for path, module in modules.items() if type(module).get_extra_state is not nn.Module.get_extra_state}
