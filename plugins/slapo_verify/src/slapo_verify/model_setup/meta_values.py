"""Values for models whose parameters are on the meta device: the same for both, on copies that nobody else sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slapo_core import BuildError, Schedule, VerifyError, materialize, parameter_facts, paths, shard_spec, successor
from slapo_training.distributed import over_group

from .model_copies import copied

Values = dict[str, torch.Tensor]
"""Whole tensors by their names in the unmodified model."""


def is_empty(model: nn.Module) -> bool:
    """Return whether a parameter of the model has no values."""
    return any(parameter.is_meta for parameter in model.parameters())


def with_values(reference: nn.Module, sch: Schedule, device: torch.device) -> tuple[nn.Module, Schedule]:
    """Return both models as they are where they have values; of one that has none a copy with the other's.

    Where neither has any, both get what the model's initialiser draws. Collective over the shards' group.

    Args:
        reference: The unmodified model, or what the schedule's was before some steps.
        sch: The schedule.
        device: Where new values go.

    Raises:
        VerifyError: no initialiser gives the model values, or a step brought in a parameter that none are known for.
    """
    if is_empty(reference):
        reference = copied(reference)
        give_values(reference, sch.mod, device)
    if is_empty(sch.mod):
        sch = copied(sch)
        fill_scheduled(sch, reference)
    return reference, sch


def give_values(model: nn.Module, other: nn.Module, device: torch.device) -> None:
    """Give a model those of another one, and what this does not have of its own initialiser.

    Raises:
        VerifyError: it leaves a parameter without values.
    """
    take_values(model, other, is_unmodified=True)
    try:
        materialize(model, device=device)
    except BuildError as error:
        raise VerifyError(f"the reference is on the meta device, and {error}") from error


def fill_scheduled(sch: Schedule, reference: nn.Module) -> None:
    """Give parameters of a scheduled model that have no values those of the reference, each rank its part of them.

    Raises:
        VerifyError: a step brought in a parameter that none are known for.
    """
    if not is_empty(sch.mod):
        return
    take_values(sch.mod, reference)
    for name, parameter in sch.mod.named_parameters():
        if parameter.is_meta:
            raise VerifyError(
                f"a step brought in {name!r} on the meta device, whose values nothing tells; make the models with real weights"
            )


def take_values(model: nn.Module, other: nn.Module, *, is_unmodified: bool = False) -> None:
    """Put the values of another model in the places of parameters and buffers without any, as far as they are known.

    Args:
        model: The one that lacks values.
        other: The one that has them.
        is_unmodified: Whether a parameter that no schedule has named has the name that it has there.
    """
    values, new = _values_of(other), dict[int, torch.Tensor]()
    for path, table, name, tensor in list(_places(model)):
        names = parameter_facts(tensor).names or ((path,) if is_unmodified else ())
        whole = next((values[known] for known in names if known in values), None)
        spec = shard_spec(tensor)
        if not tensor.is_meta or whole is None or tuple(whole.shape) != (spec.full_shape if spec else tuple(tensor.shape)):
            continue
        if id(tensor) not in new:
            data = spec.local(whole) if spec else whole.clone()
            new[id(tensor)] = successor(tensor, data.to(tensor.dtype))
        table[name] = new[id(tensor)]


def _values_of(model: nn.Module) -> Values:
    found: Values = {}
    for walk in (model.named_parameters, model.named_buffers):
        for name, tensor in walk():
            whole = None if tensor.is_meta else over_group(tensor, lambda each: each)
            if whole is not None:
                found.update(dict.fromkeys(parameter_facts(tensor).names or (name,), whole.detach()))
    return found


def _places(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            yield from ((paths.join(path, name), table, name, tensor) for name, tensor in table.items() if tensor is not None)


def device_for(model: nn.Module, asked: torch.device | str | None) -> torch.device:
    """Return the device to verify a model on: its own, or, where it has no values, the one that is asked for.

    ``"cuda"`` is the GPU that the model is on, and the CPU where there is none.

    Raises:
        VerifyError: no such device, or the model is on another one.
    """
    own = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), None)
    try:
        wanted = torch.device("cuda" if asked is None else asked)
    except (RuntimeError, TypeError):
        raise VerifyError(f"device is {asked!r}; give the name of a device, e.g. 'cuda'") from None
    is_default = wanted == torch.device("cuda")
    if own is not None:
        if not is_default and (wanted.type != own.type or wanted.index not in (None, own.index)):
            raise VerifyError(f"device is {str(wanted)!r} and the model is on {str(own)!r}; move it there, or leave device out")
        return own
    return torch.device("cpu") if is_default and not torch.cuda.is_available() else wanted
