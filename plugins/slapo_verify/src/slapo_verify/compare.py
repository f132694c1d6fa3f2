"""Run two models alike and list what they compute differently."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core.errors import VerifyError
from slapo_core.gather import over_group
from slapo_core.parameters import facts
from slapo_core.random import rng_state, set_rng_state
from slapo_core.testing.equivalence import Difference, Run, Tolerance, differences, of_named, run_model, weighted_sum

from .dropouts import same_random_state

Loss = Callable[[Any], torch.Tensor | None]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
LEVELS = ("outputs", "grads", "step")

_TOLERANCES = {
    torch.float64: Tolerance(0.0, 1e-9, 1e-9),
    torch.float32: Tolerance(1e-8, 1e-4, 1e-4),
    torch.float16: Tolerance(1e-8, 2e-3, 2e-3),
    torch.bfloat16: Tolerance(1e-8, 2e-2, 2e-2),
}
"""By the least precise type of the reference's parameters; of the last two, rounding is measured besides."""
_TIMES = 6.0
"""How many times the unmodified model's own largest rounding error another rounding may be off."""
_SAME = Tolerance(0.0, 0.0)


def tolerance_of(model: nn.Module) -> Tolerance:
    """How far apart rounding alone may bring what is computed in the types of the model's parameters."""
    types = {each.dtype for each in model.parameters() if each.is_floating_point()}
    return max((_TOLERANCES[dtype] for dtype in types if dtype in _TOLERANCES), key=lambda each: each.scale, default=_SAME)


@dataclass(frozen=True)
class Task:
    """What both models are asked to do.

    Args:
        args: Positional inputs.
        kwargs: Keyword inputs.
        level: ``"outputs"``, ``"grads"`` or ``"step"``.
        loss: ``loss(outputs)``; None is the outputs' own, or else all of them weighted.
        optimizer: ``parameters -> Optimizer`` for the step.
        training: Mode of both models.
        tolerance: How far apart numbers may be.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    level: str
    loss: Loss | None
    optimizer: OptimizerFactory
    training: bool
    tolerance: Tolerance


@dataclass
class Computed:
    """What a model computed.

    Args:
        weights: The parameters, by original name, as they were.
        run: Outputs, loss, gradients.
        updates: What the optimizer's step added to each parameter, by original name.
        draws: Whether it drew random numbers.
    """

    weights: dict[str, torch.Tensor | None]
    run: Run
    updates: dict[str, torch.Tensor | None] = field(default_factory=dict)
    draws: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors of each kind."""
        outputs = [value for _, value in self.run.outputs if isinstance(value, torch.Tensor)]
        gradients = [value for value in self.run.param_grads.values() if value is not None]
        found = {
            "weights": len(self.weights),
            "outputs": len(outputs),
            "gradients": len(gradients),
            "updates": len(self.updates),
        }
        return {what: count for what, count in found.items() if count}


def compute(model: nn.Module, task: Task) -> Computed:
    """Do the task; the model is left as it was, its random state, mode, gradients and buffers included. Collective."""
    with _left_alone(model, task.training):
        state = rng_state()
        with torch.set_grad_enabled(task.level != "outputs"):
            run = run_model(model, task.args, dict(task.kwargs), task.loss or _default_loss)
        draws = not same_random_state(state, rng_state())
        updates = _updates(model, task) if task.level == "step" else {}
        return Computed(_by_original_name(model, torch.Tensor.detach), run, updates, draws)


def compare(expected: Computed, actual: Computed, tolerance: Tolerance) -> Iterator[Difference]:
    """What differs, weights first, then outputs."""
    known = {name: value for name, value in expected.weights.items() if name in actual.weights}
    yield from of_named("weight", known, actual.weights, _SAME)
    yield from differences(expected.run, actual.run, tolerance)
    yield from of_named("update", expected.updates, actual.updates, tolerance)


def largest(expected: Computed, actual: Computed) -> Difference | None:
    """The largest absolute error that there is."""
    found = [each for each in compare(expected, actual, _SAME) if each.absolute is not None]
    return max(found, key=lambda each: each.absolute or 0.0, default=None)


def _updates(model: nn.Module, task: Task) -> dict[str, torch.Tensor | None]:
    """What one step of the optimizer adds to each parameter; the weights are put back."""
    before = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    try:
        outputs = model(*task.args, **task.kwargs)
        total = (task.loss or _default_loss)(outputs)
        if total is None or not total.requires_grad:
            raise VerifyError("level='step' needs a loss that gradients come from; give loss=, a function of the outputs")
        total.backward()  # type: ignore[no-untyped-call]
        task.optimizer([each for each in before if each.requires_grad]).step()
        return _by_original_name(model, lambda parameter: parameter.detach() - before[parameter])  # type: ignore[index]
    finally:
        with torch.no_grad():
            for parameter, value in before.items():
                parameter.copy_(value)


def _by_original_name(model: nn.Module, read: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Of each parameter, whole; one that is tied stands under each of its names."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = over_group(parameter, read)
        found.update(dict.fromkeys(facts(parameter).names or (name,), value))
    return found


def _default_loss(outputs: Any) -> torch.Tensor | None:
    """The loss that the outputs have, as those of Transformers' models given labels, or else all of them weighted."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else weighted_sum(outputs)


def with_rounding(tolerance: Tolerance, reference: nn.Module, task: Task, expected: Computed) -> Tolerance:
    """The tolerance, and in half precision how far the unmodified model itself is from the same in float32."""
    half = (torch.float16, torch.bfloat16)
    if not any(each.dtype in half for each in reference.parameters()):
        return tolerance

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in half else value

    args, kwargs = pytree.tree_map(wide, (task.args, dict(task.kwargs)))
    exact = compute(copy.deepcopy(reference).float(), replace(task, args=args, kwargs=kwargs))
    pairs = [
        (f"output{path}", one, other) for (path, one), (_, other) in zip(expected.run.outputs, exact.run.outputs, strict=True)
    ]
    pairs.append(("loss", expected.run.loss, exact.run.loss))
    for what, one, other in (
        ("gradient", expected.run.param_grads, exact.run.param_grads),
        ("update", expected.updates, exact.updates),
    ):
        pairs += [(f"{what} of {name!r}", value, other.get(name)) for name, value in one.items()]
    both = [
        (what, one, other) for what, one, other in pairs if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    ]
    noise = {what: _TIMES * float((one.float() - other).abs().max()) for what, one, other in both if one.numel()}
    return replace(tolerance, noise={what: size for what, size in noise.items() if math.isfinite(size)})


def put_together(expected: Computed, actual: Computed, group: dist.ProcessGroup | None) -> tuple[Computed, list[str]]:
    """What was computed, with outputs whole of which each rank has a part along one dimension; and which those are.

    Collective over the group.
    """
    if group is None or dist.get_world_size(group) == 1:
        return actual, []
    before = dict(expected.run.outputs)
    dims = {path: _split_dim(before.get(path), value) for path, value in actual.run.outputs}
    agreed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(agreed, dims, group=group)
    outputs, joined = [], []
    for path, value in actual.run.outputs:
        dim = dims[path]
        if dim is not None and all(each.get(path) == dim for each in agreed):
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, value, group=group)
            whole = torch.cat(parts, dim)
            if whole.shape == before[path].shape:
                value = whole
                joined.append(f"output{path}")
        outputs.append((path, value))
    return replace(actual, run=replace(actual.run, outputs=outputs)), joined


def _split_dim(expected: Any, actual: Any) -> int | None:
    """The only dimension along which a tensor is smaller than expected."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor) or expected.dim() != actual.dim():
        return None
    smaller = [dim for dim in range(expected.dim()) if actual.shape[dim] != expected.shape[dim]]
    return smaller[0] if len(smaller) == 1 and actual.shape[smaller[0]] < expected.shape[smaller[0]] else None


@contextmanager
def _left_alone(model: nn.Module, training: bool) -> Iterator[None]:
    state, modes = rng_state(), {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        for parameter in gradients:
            parameter.grad = None
        model.train(training)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        set_rng_state(state)
