"""Changes of a model for a comparison, such as dropout off, and rollback of those that a run makes to it and to the process."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core import VerifyError, rng_state, set_rng_state
from slapo_tracing.nodes import forward_wrappers


@contextmanager
def model_rollback(model: nn.Module, training: bool) -> Iterator[Callable[[], None]]:
    """Run a model in a mode in a ``with`` block, initially without gradients.

    Restored are its mode, gradients, buffers, tensors kept from a graph, weights renormalised by lookups, and random states.

    Yields:
        A function that raises ``VerifyError`` if the model wrote into a parameter.
    """
    numpy: Any = sys.modules.get("numpy")
    states = rng_state(), random.getstate(), numpy and numpy.random.get_state()
    modes = {module: module.training for module in model.modules()}
    places = [(module, dict(module._buffers), dict(vars(module))) for module in model.modules()]
    kept = {tensor: tensor.detach().clone() for tensor in (*model.buffers(), *_renormalised_weights(model))}
    versions = {each: each._version for each in model.parameters() if each not in kept and not each.is_inference()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        for parameter in gradients:
            parameter.grad = None
        model.train(training)
        yield lambda: _check_unwritten(model, versions)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, buffers, attributes in places:  # some put new ones in their places
            module._buffers.clear()
            module._buffers.update(buffers)
            _drop_graphs(module, attributes)
        for tensor, value in kept.items():
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if tensor.shape != value.shape:
                    tensor.resize_(value.shape)
                tensor.copy_(value)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])


def _check_unwritten(model: nn.Module, versions: Mapping[nn.Parameter, int]) -> None:
    changed = [name for name, each in model.named_parameters() if each in versions and each._version != versions[each]]
    if changed:
        raise VerifyError(f"the forward writes into the parameter {changed[0]!r}, which is changed now; no two runs are alike")


def _renormalised_weights(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight


def _drop_graphs(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Drop tensors with a graph that a module has kept, such as a loss, since the module could not be copied with them."""
    for name, value in list(vars(module).items()):
        has_graph = any(isinstance(each, torch.Tensor) and each.grad_fn for each in pytree.tree_leaves(value))
        if value is before.get(name) or not has_graph:
            continue
        if name in before:
            vars(module)[name] = before[name]
        else:
            del vars(module)[name]


@contextmanager
def local_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Make BatchNorms with statistics over all replicas use their own batch, in a ``with`` block.

    Every replica runs the same full batch here. Counted once per replica, it would have another unbiased variance.
    """
    found = (each for module in model.modules() for each in forward_wrappers(module))
    wrappers: list[Any] = [each for each in found if getattr(each, "over_replicas", False)]
    groups = [each.group for each in wrappers]
    for each in wrappers:
        each.group = None
    try:
        yield
    finally:
        for each, group in zip(wrappers, groups, strict=True):
            each.group = group


def disable_dropout(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Set the probability of every dropout to 0: of torch's modules, and of attributes of modules and their configs.

    Returns:
        The changed attributes: their holder, name, and former value.
    """
    found: list[tuple[Any, str, float]] = []
    for module in model.modules():
        holders = [module, *(each for name in ("config", "cfg") if (each := vars(module).get(name)) is not None)]
        for holder in holders:
            is_dropout = isinstance(holder, nn.modules.dropout._DropoutNd)
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if ("drop" in name or (is_dropout and name == "p")) and type(value) is float and value > 0:
                    found.append((holder, name, value))
                    setattr(holder, name, 0.0)
    return found


@contextmanager
def dropout_disabled(*models: nn.Module) -> Iterator[int]:
    """Disable dropout in a ``with`` block; yields the number of dropouts."""
    found = [each for model in models for each in disable_dropout(model)]
    try:
        yield len(found)
    finally:
        for holder, name, value in reversed(found):
            setattr(holder, name, value)


def same_random_state(one: Any, other: Any) -> bool:
    """Return True if nothing was drawn between two results of ``rng_state``."""
    ours, theirs = (torch.utils._pytree.tree_leaves(astuple(each)) for each in (one, other))
    equal = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)  # noqa: E731
    return len(ours) == len(theirs) and all(map(equal, ours, theirs))
