"""A whole parameter in the place of its part while a hook runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from slapo_core import ShardSpec, parameter_facts

from ..distributed.full_tensors import gather_parts, plain
from .sharded_attributes import CUT, attributes_cut_with

Place = tuple[nn.Module, str]
Origin = Callable[[], torch.Tensor | None]
"""Gives the parameter that a part was cut from, as long as somebody has it."""


@contextmanager
def whole_parameter(
    part: torch.Tensor, spec: ShardSpec, origin: Origin, places: Sequence[Place], *, in_place: bool
) -> Iterator[nn.Parameter]:
    """Give the places of a part the whole parameter, with the values of now. Collective over the ranks of the parts.

    It is the parameter of the unmodified model where the user still has that, as a hook may have closed over it. Values that
    are changed inside go to the part.

    Args:
        part: This rank's part.
        spec: How it was cut.
        origin: Origin of the part.
        places: Where the model has the part.
        in_place: Whether the values stay in the parameter of the unmodified model; else it has those of before again.
    """
    local = plain(part)
    assert local is not None
    values = gather_parts(local, spec)
    found = origin()
    if isinstance(found, nn.Parameter) and found.shape == values.shape and not found.is_meta:
        whole, before = found, found.data
        if in_place and (before.dtype, before.device) == (values.dtype, values.device):
            values = before.copy_(values)  # views of it are up to date as well
    else:
        whole = _stand_in(part, values, spec)
        before = values
    whole.data = values
    for module, name in places:
        module._parameters[name] = whole
    try:
        yield whole
    finally:
        for module, name in places:
            module._parameters[name] = part  # type: ignore[assignment]
        values, whole.data = whole.data, values if in_place else before
    changed = spec.local(values)
    if not torch.equal(changed, local):
        with torch.no_grad():
            local.copy_(changed)


def _stand_in(part: torch.Tensor, values: torch.Tensor, spec: ShardSpec) -> nn.Parameter:
    """Make a parameter of these values with the attributes of the whole one."""
    whole = nn.Parameter(values, requires_grad=part.requires_grad)
    vars(whole).update(vars(part))
    vars(whole).update({name: gather_parts(value, spec) for name, value in attributes_cut_with(part).items()})
    vars(whole).pop(CUT, None)
    whole.__dict__.pop("_slapo_facts", None)
    parameter_facts(whole).names = parameter_facts(part).names
    return whole
