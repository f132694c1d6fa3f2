"""Values for models with meta parameters: equal for both models, on private copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slapo_core import BuildError, Schedule, VerifyError, materialize, parameter_facts, paths, shard_spec, successor
from slapo_training.distributed import over_group

from .model_copies import copy_model

Values = dict[str, torch.Tensor]
"""Full tensors by their names in the unmodified model."""


def has_meta_parameters(model: nn.Module) -> bool:
    """Return True if a parameter of the model has no values."""
    return any(parameter.is_meta for parameter in model.parameters())


def materialize_models(reference: nn.Module, sch: Schedule, device: torch.device) -> tuple[nn.Module, Schedule]:
    """Return both models with values; a model without values is copied and gets those of the other.

    If neither has values, both get those of the model's initialiser. Collective over the shards' group. Raises ``VerifyError``
    if that gives no values, or a step created a parameter without known values.
    """
    if has_meta_parameters(reference):
        reference = copy_model(reference)
        materialize_from(reference, sch.mod, device)
    if has_meta_parameters(sch.mod):
        sch = copy_model(sch)
        fill_scheduled(sch, reference)
    return reference, sch


def materialize_from(model: nn.Module, other: nn.Module, device: torch.device) -> None:
    """Give a model the values of another; others come from its initialiser, else ``VerifyError`` is raised."""
    copy_values(model, other, is_unmodified=True)
    try:
        materialize(model, device=device)
    except BuildError as error:
        raise VerifyError(f"the reference is on the meta device, and {error}") from error


def fill_scheduled(sch: Schedule, reference: nn.Module) -> None:
    """Give a scheduled model's meta parameters their part of the reference; raise ``VerifyError`` if it lacks one."""
    if not has_meta_parameters(sch.mod):
        return
    copy_values(sch.mod, reference)
    for name, parameter in sch.mod.named_parameters():
        if parameter.is_meta:
            what = f"a step brought in {name!r} on the meta device, whose values nothing tells"
            raise VerifyError(f"{what}; make the models with real weights")


def copy_values(model: nn.Module, other: nn.Module, *, is_unmodified: bool = False) -> None:
    """Replace meta parameters and buffers by the values of another model, if these are known.

    If ``is_unmodified``, parameters without facts have the same names in both.
    """
    values, new = _values_of(other), dict[int, torch.Tensor]()
    for path, table, name, tensor in list(_tensor_slots(model)):
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


def _tensor_slots(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            yield from ((paths.join(path, name), table, name, tensor) for name, tensor in table.items() if tensor is not None)


def device_for(model: nn.Module, asked: torch.device | str | None) -> torch.device:
    """Return the device to verify a model on: its own, or, if it has no values, the requested one.

    ``"cuda"`` is the GPU of the model, and the CPU if there is none.

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
