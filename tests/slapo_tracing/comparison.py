"""Compare a traced module with the original: outputs, gradients, buffers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slapo_tracing import trace_module
from slapo_tracing.graphs import TracedModule
from slapo_tracing.nodes.nested_values import walk


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor inside a structure of any kind."""
    return [part for _, part, _ in walk(value) if isinstance(part, torch.Tensor)]


def run(call: nn.Module, owner: nn.Module, inputs: Mapping[str, Any], seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Output and the gradients of ``owner`` after a backward from the loss, or else from the sum of the outputs."""
    owner.zero_grad()
    torch.manual_seed(seed)
    out = call(**inputs)
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = sum(tensor.float().sum() for tensor in tensors(out) if tensor.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return out, {name: None if p.grad is None else p.grad.clone() for name, p in owner.named_parameters()}


def assert_same(model: nn.Module, traced: TracedModule, inputs: Mapping[str, Any]) -> None:
    """The traced module shares the model's parameters and computes the same from the same buffers."""
    assert list(traced.state_dict()) == list(model.state_dict())
    state = copy.deepcopy(model.state_dict())
    expected, gradients = run(model, model, inputs)
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    found, found_gradients = run(traced, model, inputs)
    assert type(found) is type(expected)
    assert [(path, parts and list(parts)) for path, _, parts in walk(found)] == [
        (path, parts and list(parts)) for path, _, parts in walk(expected)
    ]
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.requires_grad == other.requires_grad
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    for name, gradient in gradients.items():
        assert (gradient is None) == (found_gradients[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, after[name], equal_nan=True)
    model.load_state_dict(state)


def check(model: nn.Module, *args: Any, leaf: Callable[[str, nn.Module], bool] = lambda path, module: False) -> TracedModule:
    """Trace with positional inputs and compare."""
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    traced = trace_module(model, args, leaf=leaf)
    assert torch.equal(rng, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    names = list(inspect.signature(traced.forward).parameters)
    assert_same(model, traced, dict(zip(names, args, strict=False)))
    return traced
