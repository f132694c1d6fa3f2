"""Check that a step of SGD on the scheduled model equals one on the unmodified model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from slapo_core import parameter_facts
from slapo_verify.comparison import dense, weighted_sum

from ..examples.case import Case

MAX_CHANGE = 0.1
"""Largest change of a number by the step."""
TOLERANCE_FACTOR = 10
"""Factor by which tolerances grow after the step, since each model has its own rounding errors."""


def compare_trained(case: Case, reference: nn.Module, model: nn.Module) -> None:
    """Check that both compute the same after the same step of SGD on the parameters with gradients in both."""
    if {"ties", "names", "values"} & {*case.example.changes}:
        return  # of parameters that are no longer the same ones, a step changes others
    mine, theirs = _backward(case, reference), _backward(case, model)
    common = mine.keys() & theirs.keys()
    largest = max((float(mine[name][1].abs().max()) for name in common if mine[name][1].numel()), default=0.0)
    rate = MAX_CHANGE / max(largest, MAX_CHANGE)
    for held in (mine, theirs):
        _descend({name: held[name] for name in common}, rate)
    wider = replace(case.example, atol=TOLERANCE_FACTOR * case.example.atol, rtol=TOLERANCE_FACTOR * case.example.rtol)
    stepped = replace(case, example=wider)
    what = "after a step of SGD, {}beside the unmodified model"
    stepped.compare(reference, model, what.format(""), case.keep(model))
    with torch.no_grad():  # where a forward may use a copy of the weights that it made before the step
        stepped.compare(reference, model, what.format("without gradients, "), case.keep(model))


def _backward(case: Case, model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return parameters and their gradients by original name."""
    torch.manual_seed(2)
    args, kwargs = case.inputs()
    total = weighted_sum(model(*args, **kwargs))
    if total is not None:
        total.backward()  # type: ignore[no-untyped-call]
    found = {name: (tensor, dense(tensor.grad)) for name, tensor in _original_parameters(model) if tensor.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _original_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield from ((original, parameter) for original in parameter_facts(parameter).names or (name,))


def _descend(held: dict[str, tuple[torch.Tensor, torch.Tensor]], rate: float) -> None:
    """Update each parameter once, under whatever names."""
    with torch.no_grad():
        for tensor, gradient in {id(tensor): (tensor, gradient) for tensor, gradient in held.values()}.values():
            tensor.sub_(gradient, alpha=rate)
