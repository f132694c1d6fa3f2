"""Equal runs of two models, and the differences of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import VerifyError, parameter_facts, rng_state

from ..model_setup.model_rollback import local_batch_statistics, model_rollback, same_random_state
from ..ranks.failure_propagation import SINGLE_RANK, Ranks
from .equivalence import (
    Difference,
    Run,
    Tolerance,
    comparable,
    difference,
    differences,
    named_differences,
    run_model,
    weighted_sum,
)
from .parameter_values import EXACT, ExpectedValues, Named, Values, added_parameters, local_part, values_of
from .tensor_leaves import dense

Loss = Callable[[Any], torch.Tensor | None]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
LEVELS = ("outputs", "grads", "step")


@dataclass(frozen=True)
class ComparisonTask:
    """Task that both models run.

    Args:
        args: Positional inputs.
        kwargs: Keyword inputs.
        level: ``"outputs"``, ``"grads"`` or ``"step"``.
        loss: ``loss(outputs)``; None is the outputs' own loss, or else a weighted sum of all.
        optimizer: ``parameters -> Optimizer`` for the step.
        training: Mode of both models.
        tolerance: Allowed difference of numbers.
        rounded: Results of the unmodified model in half precision and in float32, by ``Difference.what``.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    level: str
    loss: Loss | None
    optimizer: OptimizerFactory
    training: bool
    tolerance: Tolerance
    rounded: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass
class ModelResults:
    """Results of a model.

    Args:
        weights: The parameters before the run, by original name.
        run: Outputs, loss, gradients.
        updates: Update of each parameter by the optimizer's step, by original name.
        draws: True if the model drew random numbers.
        largest: The largest error of parameter values that are close and were not gathered.
        buffers: Buffers after training that are saved and unsharded, by name.
        new: Trainable parameters that a step created without recording their parts.
    """

    weights: dict[str, torch.Tensor | None]
    run: Run
    updates: dict[str, torch.Tensor | None] = field(default_factory=dict)
    draws: bool = False
    largest: Difference | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    new: frozenset[str] = frozenset()

    def counts(self, other: ModelResults) -> dict[str, int]:
        """Return the number of tensors of each kind that are compared with another model's."""
        outputs = [value for _, value in self.run.outputs if isinstance(value, torch.Tensor)]
        gradients = {name for name, value in self.run.param_grads.items() if value is not None}
        gone = {*missing_parameters(self, other)}
        found = {
            "weights": len(self.weights.keys() - gone),
            "outputs": len(outputs),
            "gradients": len(gradients - gone),
            "updates": len(self.updates.keys() - gone),
            "buffers": len(self.buffers.keys() & other.buffers.keys()),
        }
        return {what: count for what, count in found.items() if count}


def compute(
    model: nn.Module,
    task: ComparisonTask,
    expected: ModelResults | None = None,
    ranks: Ranks = SINGLE_RANK,
    running: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it keeps nothing
) -> ModelResults:
    """Run the task, and restore the model, see ``model_rollback``. Collective.

    ``running`` is the context of the forward and the backward. Values of parameters are compared with the expected ones shard
    by shard. Only those that differ are gathered; for the others the expected tensor is used. A step uses the expected
    gradients where the model's are close.
    """

    def expected_values(values: Named | None, tolerance: Tolerance) -> ExpectedValues | None:
        return None if values is None else ExpectedValues(values, tolerance, ranks)

    def run_checked() -> Run:
        found = run_model(cast(nn.Module, kept), task.args, dict(task.kwargs), loss)
        check_unwritten()
        return found

    with (
        model_rollback(model, task.training) as check_unwritten,
        local_batch_statistics(model),
        default_modes(task.level != "outputs"),
    ):
        state = rng_state()
        kept = _GradientRecorder(model)
        loss = _checked_loss(task.loss or _default_loss)
        with running:
            run = ranks.run_on_all(run_checked)
        draws, left = not same_random_state(state, rng_state()), _buffers(model) if task.training else {}
        found = [
            values_of(model, "weight", torch.Tensor.detach, expected_values(expected.weights if expected else None, EXACT))
        ]
        before = expected_values(expected.run.param_grads if expected else None, task.tolerance)
        if task.level != "outputs":
            found.append(values_of(model, "gradient", lambda one: kept.gradients.get(cast(nn.Parameter, one)), before))
            run = replace(run, param_grads=found[-1].whole)
        if task.level == "step":
            # the expected gradients where these are close: an optimizer that divides by their size amplifies the error
            near = {each: local_part(whole, each).clone() for each, whole in found[-1].near.items() if whole is not None}
            gradients = {**kept.gradients, **near}
            found.append(
                _updates(model, task, gradients, expected_values(expected.updates if expected else None, task.tolerance))
            )
        errors = (each.largest for each in found if each.largest)
        most = max(errors, key=lambda each: each.absolute or 0.0, default=None)
        updates = found[2].whole if task.level == "step" else {}
        return ModelResults(found[0].whole, run, updates, draws, most, left, added_parameters(model))


@contextmanager
def default_modes(with_gradients: bool) -> Iterator[None]:
    """Turn inference mode and autocast off, and gradients on or off, in a ``with`` block."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        for kind in autocast():
            modes.enter_context(torch.autocast(kind, enabled=False))
        modes.enter_context(torch.set_grad_enabled(with_gradients))
        yield


def autocast() -> list[str]:
    """Return the device types for which autocast is on."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def _checked_loss(loss: Loss) -> Loss:
    def call(outputs: Any) -> torch.Tensor | None:
        value = loss(outputs)
        if value is not None and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise VerifyError(f"loss gave {shape}; let it return a tensor with one number, or None")
        return value

    return call


def compare(expected: ModelResults, actual: ModelResults, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield the differences, weights first, then outputs."""
    run, now, gone = expected.run, actual.run, missing_parameters(expected, actual)

    def remaining_values(before: Named, after: Named) -> dict[str, torch.Tensor | None]:
        """All but those that have been found near, or that others have replaced."""
        found = {name: one for name, one in before.items() if one is None or one is not after.get(name)}
        return {name: one for name, one in found.items() if name not in gone}

    yield from named_differences("weight", remaining_values(expected.weights, actual.weights), actual.weights, EXACT)
    known = replace(run, param_grads=remaining_values(run.param_grads, now.param_grads))
    yield from differences(known, now, tolerance)
    yield from named_differences("update", remaining_values(expected.updates, actual.updates), actual.updates, tolerance)
    common = expected.buffers.keys() & actual.buffers.keys()  # what takes a module's place may keep others
    yield from named_differences("buffer", {name: expected.buffers[name] for name in sorted(common)}, actual.buffers, tolerance)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the buffers, without sharded ones, which the unmodified model does not have."""
    saved = model.state_dict().keys()
    named = ((name, buffer) for name, buffer in model.named_buffers() if name in saved and parameter_facts(buffer).spec is None)
    return {name: buffer.detach().clone() for name, buffer in named}


def missing_parameters(expected: ModelResults, actual: ModelResults) -> list[str]:
    """Return the parameters that the scheduled model lacks if it has new ones instead, as after fusing projections."""
    return [name for name in expected.weights if name not in actual.weights] if actual.new else []


def largest(expected: ModelResults, actual: ModelResults) -> Difference | None:
    """Return the largest absolute error, or None."""
    found: tuple[float, str, Any, Any] | None = None
    near = actual.largest
    for what, one, other in pairs(expected, actual):
        is_comparable = one is not other and one.numel() and one.shape == other.shape and one.dtype is other.dtype
        if is_comparable and not torch.equal(one, other):
            error = float((one - other).abs().max()) if one.dtype is not torch.bool else 1.0
            if found is None or error > found[0]:  # NaN is in no order: it is a difference of its own
                found = error, what, one, other
    if found is None or (near is not None and found[0] <= (near.absolute or 0.0)):
        return near
    return next(difference(*found[1:], EXACT), None)


def numbers(computed: ModelResults) -> Iterator[torch.Tensor]:
    """Yield all results and the weights."""
    return (one for _, one, _ in pairs(computed, computed))


def pairs(expected: ModelResults, actual: ModelResults) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the tensors of both, by ``Difference.what``."""
    one, other = expected.run, actual.run
    named = (
        ("weight", expected.weights, actual.weights),
        ("gradient", one.param_grads, other.param_grads),
        ("update", expected.updates, actual.updates),
        ("buffer", expected.buffers, actual.buffers),
    )
    found: list[tuple[str, Any, Any]] = [("loss", one.loss, other.loss)]
    for what, before, after in (
        ("output", one.outputs, other.outputs),
        ("what the forward left of input", one.inputs, other.inputs),
        ("gradient of input", one.input_grads, other.input_grads),
    ):
        known = dict(after)
        found += [(what + path, value, known.get(path)) for path, value in before]
    found += [(f"{what} of {name!r}", value, now.get(name)) for what, was, now in named for name, value in was.items()]
    for each, was, now in found:
        if isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor):
            yield each, comparable(was), comparable(now)


class _GradientRecorder:
    """Wrapper of the model for ``run_model`` that records gradients before ``run_model`` resets them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.gradients: dict[nn.Parameter, torch.Tensor | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._model.parameters()

    def named_parameters(self, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        gradients = ((parameter, parameter.grad) for parameter in self._model.parameters())
        self.gradients = {parameter: None if grad is None else dense(grad) for parameter, grad in gradients}
        return iter(())


def _updates(
    model: nn.Module,
    task: ComparisonTask,
    gradients: Mapping[nn.Parameter, torch.Tensor | None],
    expected: ExpectedValues | None,
) -> Values:
    """Return the update of each parameter by one step of the optimizer; the weights are restored."""
    if all(gradient is None for gradient in gradients.values()):
        raise VerifyError("level='step' needs a loss that gradients come from; give loss=, a function of the outputs")
    before = {parameter: parameter.detach().clone() for parameter in gradients}

    def update_of(parameter: torch.Tensor) -> torch.Tensor:
        now, was = parameter.detach(), before[cast(nn.Parameter, parameter)]
        return now ^ was if now.dtype is torch.bool else comparable(now) - comparable(was)

    def step() -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        stepping: Any = task.optimizer([each for each in before if each.requires_grad])
        if not callable(getattr(stepping, "step", None)):
            raise VerifyError(f"optimizer gave {stepping!r}; let it return an optimizer of the parameters it is given")
        stepping.step()

    try:
        (expected.ranks if expected is not None else SINGLE_RANK).run_on_all(step)
        return values_of(model, "update", update_of, expected)
    finally:
        with torch.no_grad():
            for parameter, value in before.items():
                parameter.copy_(value)


def _default_loss(outputs: Any) -> torch.Tensor | None:
    """Return the outputs' own loss, as Transformers models have it given labels, or else a weighted sum of all outputs."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else weighted_sum(outputs)


def gather_outputs(
    expected: ModelResults, actual: ModelResults, group: dist.ProcessGroup | None
) -> tuple[ModelResults, list[str]]:
    """Return the results with outputs gathered that each rank has a part of along one dimension, and the names of these.

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
            dist.all_gather_object(parts, value.cpu(), group=group)
            whole = torch.cat(parts, dim).to(value.device)
            if whole.shape == before[path].shape:
                value = whole
                joined.append(f"output{path}")
        outputs.append((path, value))
    return replace(actual, run=replace(actual.run, outputs=outputs)), joined


def _split_dim(expected: Any, actual: Any) -> int | None:
    """Return the only dimension along which a tensor is smaller than expected, or None."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor) or expected.dim() != actual.dim():
        return None
    smaller = [dim for dim in range(expected.dim()) if actual.shape[dim] != expected.shape[dim]]
    return smaller[0] if len(smaller) == 1 and actual.shape[smaller[0]] < expected.shape[smaller[0]] else None
