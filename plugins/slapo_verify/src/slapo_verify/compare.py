"""Run two models alike and list what they compute differently."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core.errors import VerifyError
from slapo_core.gather import over_group
from slapo_core.parameters import facts
from slapo_core.random import rng_state, set_rng_state
from slapo_core.testing.equivalence import (
    Difference,
    Run,
    Tolerance,
    difference,
    differences,
    of_named,
    run_model,
    weighted_sum,
)

from .dropouts import same_random_state

Loss = Callable[[Any], torch.Tensor | None]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
Named = Mapping[str, torch.Tensor | None]
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
_MODERATE = 0.25
"""Of a tensor, as far as rounding in half precision may bring it where signs of activations near 0 turn."""
_HALF = (torch.float16, torch.bfloat16)
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
        kept = _Kept(model)
        with torch.set_grad_enabled(task.level != "outputs"):
            run = run_model(cast(nn.Module, kept), task.args, dict(task.kwargs), task.loss or _default_loss)
        draws = not same_random_state(state, rng_state())
        updates = _updates(model, task, kept.gradients) if task.level == "step" else {}
        return Computed(_by_original_name(model, torch.Tensor.detach), run, updates, draws)


def compare(expected: Computed, actual: Computed, tolerance: Tolerance) -> Iterator[Difference]:
    """What differs, weights first, then outputs."""
    known = {name: value for name, value in expected.weights.items() if not _is_equal(value, actual.weights.get(name, value))}
    yield from of_named("weight", known, actual.weights, _SAME)
    run, now = expected.run, actual.run
    yield from differences(
        replace(run, param_grads=_far("gradient", run.param_grads, now.param_grads, tolerance)), now, tolerance
    )
    yield from of_named("update", _far("update", expected.updates, actual.updates, tolerance), actual.updates, tolerance)


def _far(what: str, expected: Named, actual: Named, tolerance: Tolerance) -> dict[str, torch.Tensor | None]:
    """Those that are not near by what is allowed to every number alike, which is told in fewer passes over them."""

    def is_near(name: str, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        if one is None or other is None or one.shape != other.shape or one.dtype is not other.dtype or not one.numel():
            return False
        if not one.is_floating_point() or one.device != other.device:
            return False
        size = float(one.norm()) / one.numel() ** 0.5
        allowed = tolerance.atol + tolerance.scale * size + tolerance.noise.get(f"{what} of {name!r}", 0.0)
        return math.isfinite(size) and float((one - other).abs().max()) <= 0.99 * allowed  # NaN is not

    return {name: one for name, one in expected.items() if not is_near(name, one, actual.get(name))}


def _is_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype is other.dtype and torch.equal(one, other)


def largest(expected: Computed, actual: Computed) -> Difference | None:
    """The largest absolute error that there is."""
    found: tuple[float, str, Any, Any] | None = None
    for what, one, other in _pairs(expected, actual):
        if one.numel() and one.shape == other.shape and one.dtype is other.dtype and not torch.equal(one, other):
            error = float((one - other).abs().max()) if one.dtype is not torch.bool else 1.0
            if found is None or error > found[0]:  # NaN is in no order: it is a difference of its own
                found = error, what, one, other
    return None if found is None else next(difference(*found[1:], _SAME), None)


def _pairs(expected: Computed, actual: Computed) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Tensors of both, by what a ``Difference`` calls them."""
    one, other = expected.run, actual.run
    named = (
        ("weight", expected.weights, actual.weights),
        ("gradient", one.param_grads, other.param_grads),
        ("update", expected.updates, actual.updates),
    )
    found: list[tuple[str, Any, Any]] = [("loss", one.loss, other.loss)]
    for what, before, after in (
        ("output", one.outputs, other.outputs),
        ("gradient of input", one.input_grads, other.input_grads),
    ):
        known = dict(after)
        found += [(what + path, value, known.get(path)) for path, value in before]
    found += [(f"{what} of {name!r}", value, now.get(name)) for what, was, now in named for name, value in was.items()]
    return (each for each in found if isinstance(each[1], torch.Tensor) and isinstance(each[2], torch.Tensor))


class _Kept:
    """The model for ``run_model``, which has the gradients looked at before it takes them away: for the step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.gradients: dict[nn.Parameter, torch.Tensor | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._model.parameters()

    def named_parameters(self, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.gradients = {parameter: parameter.grad for parameter in self._model.parameters()}
        return self._model.named_parameters(**options)


def _updates(
    model: nn.Module, task: Task, gradients: Mapping[nn.Parameter, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """What one step of the optimizer adds to each parameter; the weights are put back."""
    if all(gradient is None for gradient in gradients.values()):
        raise VerifyError("level='step' needs a loss that gradients come from; give loss=, a function of the outputs")
    before = {parameter: parameter.detach().clone() for parameter in gradients}
    try:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
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
    """The tolerance with what rounding does to a weight's update, and in half precision to the unmodified model."""
    noise = {f"update of {name!r}": stored(each) for name, each in named_all(reference)} if task.level == "step" else {}
    if not is_half(reference):
        return replace(tolerance, noise=noise)
    exact = compute(copy.deepcopy(reference).float(), in_float32(task))
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
    for what, low, high in both:
        noise[what] = noise.get(what, 0.0) + (_TIMES * float((low.float() - high).abs().max()) if low.numel() else 0.0)
    return replace(tolerance, noise={what: size for what, size in noise.items() if math.isfinite(size)})


def is_half(model: nn.Module) -> bool:
    """Whether it has parameters in half precision."""
    return any(each.dtype in _HALF for each in model.parameters())


def in_float32(task: Task) -> Task:
    """The task with inputs that were in half precision in float32, and its tolerance."""

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value

    args, kwargs = pytree.tree_map(wide, (task.args, dict(task.kwargs)))
    return replace(task, args=args, kwargs=kwargs, tolerance=_TOLERANCES[torch.float32])


def is_moderate(expected: Computed, actual: Computed, found: Iterable[Difference]) -> bool:
    """Whether tensors that differ do so in some elements, and by less than a quarter of themselves."""
    pairs = {what: (one, other) for what, one, other in _pairs(expected, actual)}
    for each in found:
        one, other = pairs.get(each.what, (None, None))
        if each.absolute is None or one is None or other is None or one.shape != other.shape:
            return False
        if not float((other.double() - one.double()).norm()) <= _MODERATE * float(one.double().norm()):
            return False
    return True


def stored(weight: torch.Tensor) -> float:
    """How far off the difference of two of a weight's values may be, each of which is rounded: one step of the largest."""
    return torch.finfo(weight.dtype).eps * float(weight.detach().abs().max()) if weight.numel() else 0.0


def named_all(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Floating-point parameters under all of their names."""
    found = model.named_parameters(remove_duplicate=False)
    return ((name, each) for name, each in found if each.is_floating_point())


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
