"""Rollback of what a run of a model changes in it and in the process."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core import VerifyError, rng_state, set_rng_state


@contextmanager
def model_rollback(model: nn.Module, training: bool) -> Iterator[Callable[[], None]]:
    """Run a model in a mode inside, without gradients at first; yield a function that raises if it wrote into a parameter.

    Its mode, gradients, buffers, what it keeps of a graph, weights that lookups renormalise, and random states are put back.
    """
    states = rng_state(), random.getstate(), _numpy_state()
    modes = {module: module.training for module in model.modules()}
    places = [(module, dict(module._buffers), dict(vars(module))) for module in model.modules()]
    kept = {tensor: tensor.detach().clone() for tensor in (*model.buffers(), *_renormalised(model))}
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
        if states[2] is not None:
            sys.modules["numpy"].random.set_state(states[2])


def _check_unwritten(model: nn.Module, versions: Mapping[nn.Parameter, int]) -> None:
    changed = [name for name, each in model.named_parameters() if each in versions and each._version != versions[each]]
    if changed:
        raise VerifyError(f"the forward writes into the parameter {changed[0]!r}, which is changed now; no two runs are alike")


def _renormalised(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight


def _drop_graphs(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Drop what a module has kept of a graph, a loss say: it could not be copied then."""
    for name, value in list(vars(module).items()):
        if value is before.get(name) or not any(
            isinstance(each, torch.Tensor) and each.grad_fn for each in pytree.tree_leaves(value)
        ):
            continue
        if name in before:
            vars(module)[name] = before[name]
        else:
            del vars(module)[name]


def _numpy_state() -> Any:
    loaded: Any = sys.modules.get("numpy")
    return None if loaded is None else loaded.random.get_state()
