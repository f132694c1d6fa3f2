"""Optimizer state of sharded stand-ins in the form of checkpoints.

Per-element state is sharded like its parameter. Any other tensor is whole on every rank: a replicated DTensor, or a plain
tensor for a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..introspection.nested_optimizers import Optimizer, optimizers_in


def normalize_state(optimizer: Optimizer) -> None:
    """Bring the state of sharded parameters into this form after a step. Collective if the step left another form."""
    for each in optimizers_in(optimizer):
        for parameter, state in each.state.items():
            if isinstance(parameter, DTensor) and isinstance(state, dict):
                for key, value in state.items():
                    if isinstance(value, DTensor) and (new := _match_placements(value, parameter)) is not value:
                        state[key] = new


def _match_placements(value: DTensor, parameter: DTensor) -> torch.Tensor:
    if value.dim() == 0:
        return value.full_tensor()
    form = parameter.placements if value.shape == parameter.shape else (Replicate(),)
    return value if value.placements == form else value.redistribute(placements=form)


def check_normalized(optimizer: Optimizer) -> None:
    """Refuse state that a checkpoint could not restore.

    Raises:
        ValueError: a sharded tensor is not in the state of its parameter, or a tensor is neither sharded nor replicated.
    """
    for each in optimizers_in(optimizer):
        for parameter, state in each.state.items():
            is_part = isinstance(parameter, DTensor)
            for value in state.values() if isinstance(state, dict) else [state]:
                is_known = is_part and isinstance(value, torch.Tensor)
                if is_known and not isinstance(value, DTensor) and value.dim():
                    raise ValueError("it keeps a plain tensor for a sharded parameter")
                if not is_known and has_parts(value):
                    raise ValueError("it keeps sharded tensors inside other values")
        rest = [value for key, value in each.state_dict().items() if key != "state"]
        if has_parts(rest):
            raise ValueError("it keeps sharded tensors beside the state of its parameters")


def has_parts(value: Any) -> bool:
    """Return True if a value, or a nested list, tuple or dict, has a DTensor."""
    if isinstance(value, dict):
        return any(map(has_parts, value.values()))
    return any(map(has_parts, value)) if isinstance(value, list | tuple) else isinstance(value, DTensor)


def step_state(parameter: torch.Tensor, elements: Mapping[Any, torch.Tensor], rest: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return loaded state of a sharded stand-in, or a plain parameter, in the form of its steps.

    ``elements`` is per-element state of the rank's shard, by the optimizer's keys.
    """
    if not isinstance(parameter, DTensor):
        return {**elements, **rest}
    mesh, device = parameter.device_mesh, parameter.device
    parts = {
        key: DTensor.from_local(each.to(device), mesh, parameter.placements, run_check=False) for key, each in elements.items()
    }
    more = {
        key: DTensor.from_local(each.to(device), mesh, [Replicate()], run_check=False)
        if isinstance(each, torch.Tensor) and each.dim()
        else each
        for key, each in rest.items()
    }
    return {**parts, **more}


def shard_of(parameter: DTensor) -> tuple[int, int, int]:
    """Return the sharded dimension of a stand-in, and start and size of this rank's shard."""
    dim = parameter.placements[0].dim  # type: ignore[attr-defined]
    size = parameter.to_local().shape[dim]
    return dim, parameter.device_mesh.get_local_rank() * size, size


def shares_of(parameter: DTensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of a stand-in from the state of the whole parameter."""
    elements = {key: each for key, each in state.items() if isinstance(each, torch.Tensor) and each.shape == parameter.shape}
    rest = {key: each for key, each in state.items() if key not in elements}
    place = shard_of(parameter)
    return step_state(parameter, {key: each.narrow(*place).clone() for key, each in elements.items()}, rest)
