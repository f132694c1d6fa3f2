"""Run two models alike and list what they compute differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import VerifyError, parameter_facts, rng_state

from ..model_setup.dropouts import same_random_state
from ..model_setup.fused_parameters import new_names
from ..model_setup.model_rollback import model_rollback
from ..model_setup.replica_batch_norm import one_replica
from ..ranks.failure_propagation import ALONE, Ranks
from .equivalence import Difference, Run, Tolerance, comparable, difference, differences, of_named, run_model, weighted_sum
from .parameter_values import SAME, Expected, Named, Values, part_of, values_of
from .tensor_leaves import dense

Loss = Callable[[Any], torch.Tensor | None]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
LEVELS = ("outputs", "grads", "step")


@dataclass(frozen=True)
class Task:
    """Task that both models are given.

    Args:
        args: Positional inputs.
        kwargs: Keyword inputs.
        level: ``"outputs"``, ``"grads"`` or ``"step"``.
        loss: ``loss(outputs)``; None is the outputs' own, or else all of them weighted.
        optimizer: ``parameters -> Optimizer`` for the step.
        training: Mode of both models.
        tolerance: How far apart numbers may be.
        rounded: Of the unmodified model in half precision and in float32, by what a ``Difference`` calls a tensor.
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
class Computed:
    """Results of a model.

    Args:
        weights: The parameters, by original name, as they were.
        run: Outputs, loss, gradients.
        updates: What the optimizer's step added to each parameter, by original name.
        draws: Whether it drew random numbers.
        largest: The largest error of parameters' values that are near and were not put together.
        buffers: What training leaves in those that are saved and whole, by name.
        new: Trainable parameters that a step brought in, and that do not say what they are made of.
    """

    weights: dict[str, torch.Tensor | None]
    run: Run
    updates: dict[str, torch.Tensor | None] = field(default_factory=dict)
    draws: bool = False
    largest: Difference | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    new: frozenset[str] = frozenset()

    def counts(self, other: Computed) -> dict[str, int]:
        """Count the tensors of each kind that are compared with another model's."""
        outputs = [value for _, value in self.run.outputs if isinstance(value, torch.Tensor)]
        gradients = {name for name, value in self.run.param_grads.items() if value is not None}
        gone = {*replaced(self, other)}
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
    task: Task,
    expected: Computed | None = None,
    ranks: Ranks = ALONE,
    running: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it keeps nothing
) -> Computed:
    """Do the task; the model is left as it was, see ``model_rollback``. Collective.

    ``running`` is around the forward and the backward. What belongs to parameters is compared with what is expected of them
    where it lies, and put together where it is far off: of what is near, the expected tensor stands for it. A step takes
    expected gradients where the model's are near.
    """

    def known(values: Named | None, tolerance: Tolerance) -> Expected | None:
        return None if values is None else Expected(values, tolerance, ranks)

    def ran() -> Run:
        found = run_model(cast(nn.Module, kept), task.args, dict(task.kwargs), loss)
        check_unwritten()
        return found

    with model_rollback(model, task.training) as check_unwritten, one_replica(model), plain_modes(task.level != "outputs"):
        state = rng_state()
        kept = _Kept(model)
        loss = _checked(task.loss or _default_loss)
        with running:
            run = ranks.alike(ran)
        draws, left = not same_random_state(state, rng_state()), _buffers(model) if task.training else {}
        found = [values_of(model, "weight", torch.Tensor.detach, known(expected.weights if expected else None, SAME))]
        before = known(expected.run.param_grads if expected else None, task.tolerance)
        if task.level != "outputs":
            found.append(values_of(model, "gradient", lambda one: kept.gradients.get(cast(nn.Parameter, one)), before))
            run = replace(run, param_grads=found[-1].whole)
        if task.level == "step":
            gradients = {**kept.gradients, **_shared(found[-1])}
            found.append(_updates(model, task, gradients, known(expected.updates if expected else None, task.tolerance)))
        near = max((each.largest for each in found if each.largest), key=lambda each: each.absolute or 0.0, default=None)
        updates = found[2].whole if task.level == "step" else {}
        return Computed(found[0].whole, run, updates, draws, near, left, new_names(model))


@contextmanager
def plain_modes(with_gradients: bool) -> Iterator[None]:
    """Neither inference mode nor autocast, whatever the caller is in, and gradients or none."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        for kind in autocast():
            modes.enter_context(torch.autocast(kind, enabled=False))
        modes.enter_context(torch.set_grad_enabled(with_gradients))
        yield


def autocast() -> list[str]:
    """Kinds of devices for which autocast is on."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def _checked(loss: Loss) -> Loss:
    def call(outputs: Any) -> torch.Tensor | None:
        value = loss(outputs)
        if value is not None and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise VerifyError(f"loss gave {shape}; let it return a tensor with one number, or None")
        return value

    return call


def _shared(gradients: Values) -> dict[nn.Parameter, torch.Tensor]:
    """Expected gradients of parameters whose own are near: what an optimizer divides by their size would be far apart."""
    return {each: part_of(whole, each).clone() for each, whole in gradients.near.items() if whole is not None}


def compare(expected: Computed, actual: Computed, tolerance: Tolerance) -> Iterator[Difference]:
    """Iterate over the differences, weights first, then outputs."""
    run, now, gone = expected.run, actual.run, replaced(expected, actual)

    def shown(before: Named, after: Named) -> dict[str, torch.Tensor | None]:
        """All but those that have been found near, or that others have replaced."""
        found = {name: one for name, one in before.items() if one is None or one is not after.get(name)}
        return {name: one for name, one in found.items() if name not in gone}

    yield from of_named("weight", shown(expected.weights, actual.weights), actual.weights, SAME)
    known = replace(run, param_grads=shown(run.param_grads, now.param_grads))
    yield from differences(known, now, tolerance)
    yield from of_named("update", shown(expected.updates, actual.updates), actual.updates, tolerance)
    common = expected.buffers.keys() & actual.buffers.keys()  # what takes a module's place may keep others
    yield from of_named("buffer", {name: expected.buffers[name] for name in sorted(common)}, actual.buffers, tolerance)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers as they are now; a part of one is not what the unmodified model has."""
    saved = model.state_dict().keys()
    named = ((name, buffer) for name, buffer in model.named_buffers() if name in saved and parameter_facts(buffer).spec is None)
    return {name: buffer.detach().clone() for name, buffer in named}


def replaced(expected: Computed, actual: Computed) -> list[str]:
    """Parameters that the scheduled model has no more, and new ones instead: what a step that fuses projections does."""
    return [name for name in expected.weights if name not in actual.weights] if actual.new else []


def largest(expected: Computed, actual: Computed) -> Difference | None:
    """The largest absolute error that there is."""
    found: tuple[float, str, Any, Any] | None = None
    near = actual.largest
    for what, one, other in pairs(expected, actual):
        if (
            one is not other
            and one.numel()
            and one.shape == other.shape
            and one.dtype is other.dtype
            and not torch.equal(one, other)
        ):
            error = float((one - other).abs().max()) if one.dtype is not torch.bool else 1.0
            if found is None or error > found[0]:  # NaN is in no order: it is a difference of its own
                found = error, what, one, other
    if found is None or (near is not None and found[0] <= (near.absolute or 0.0)):
        return near
    return next(difference(*found[1:], SAME), None)


def numbers(computed: Computed) -> Iterator[torch.Tensor]:
    """All that was computed, and the weights."""
    return (one for _, one, _ in pairs(computed, computed))


def pairs(expected: Computed, actual: Computed) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Tensors of both, by what a ``Difference`` calls them."""
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
        gradients = ((parameter, parameter.grad) for parameter in self._model.parameters())
        self.gradients = {parameter: None if grad is None else dense(grad) for parameter, grad in gradients}
        return iter(())


def _updates(
    model: nn.Module, task: Task, gradients: Mapping[nn.Parameter, torch.Tensor | None], expected: Expected | None
) -> Values:
    """Return what one step of the optimizer adds to each parameter; the weights are put back."""
    if all(gradient is None for gradient in gradients.values()):
        raise VerifyError("level='step' needs a loss that gradients come from; give loss=, a function of the outputs")
    before = {parameter: parameter.detach().clone() for parameter in gradients}

    def added(parameter: torch.Tensor) -> torch.Tensor:
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
        (expected.ranks if expected is not None else ALONE).alike(step)
        return values_of(model, "update", added, expected)
    finally:
        with torch.no_grad():
            for parameter, value in before.items():
                parameter.copy_(value)


def _default_loss(outputs: Any) -> torch.Tensor | None:
    """The loss that the outputs have, as those of Transformers' models given labels, or else all of them weighted."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else weighted_sum(outputs)


def put_together(expected: Computed, actual: Computed, group: dist.ProcessGroup | None) -> tuple[Computed, list[str]]:
    """Return the results with whole outputs where each rank has a part along one dimension, and which outputs those are.

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
    """The only dimension along which a tensor is smaller than expected."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor) or expected.dim() != actual.dim():
        return None
    smaller = [dim for dim in range(expected.dim()) if actual.shape[dim] != expected.shape[dim]]
    return smaller[0] if len(smaller) == 1 and actual.shape[smaller[0]] < expected.shape[smaller[0]] else None
