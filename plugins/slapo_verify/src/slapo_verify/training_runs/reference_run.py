"""Steps of the unmodified model in plain torch, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from slapo_core import VerifyError, call_arguments, rng_state, set_rng_state

from ..comparison.model_results import OptimizerFactory
from ..model_setup.model_copies import copy_model
from ..model_setup.model_rollback import same_random_state

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class TrainingResults:
    """Results of some training steps.

    Args:
        target: Name of the dialect; empty for the unmodified model.
        losses: Loss of each step.
        evaluations: Loss in evaluation mode before and after the steps.
        updates: Full update of each parameter, by original name.
        copies: Update of each copy of a parameter that this rank holds.
        types: Dtypes of the weights.
        draws: True if the forward drew random numbers.
    """

    target: str
    losses: tuple[float, ...]
    evaluations: tuple[float, float]
    updates: dict[str, torch.Tensor]
    copies: list[dict[str, torch.Tensor]] = field(default_factory=list)
    types: tuple[str, ...] = ()
    draws: bool = False

    def numbers(self) -> dict[str, torch.Tensor]:
        """Return the losses, by ``Difference.what``."""
        before, after = self.evaluations
        losses = {f"loss of step {number}": loss for number, loss in enumerate(self.losses, 1)}
        named = {"evaluation before": before, **losses, "evaluation after": after}
        return {what: torch.tensor(value, dtype=torch.float64) for what, value in named.items()}

    def values(self) -> dict[str, torch.Tensor]:
        """Return all results, by ``Difference.what``."""
        return {**self.numbers(), **{f"update of {name!r}": value for name, value in self.updates.items()}}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with a learning rate of 1, whose update is the gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def train_reference(
    model: nn.Module,
    batch: Mapping[str, Any],
    steps: int,
    loss_fn: LossFn | None,
    optimizer: OptimizerFactory,
    clip: float = 0.0,
    lr_scheduler: Callable[[Any], Any] | None = None,
    loss: Any = None,
) -> TrainingResults:
    """Train a copy of the model on the whole batch; the random state is left as it was.

    Args:
        model: The unmodified one.
        batch: Its arguments.
        steps: How many.
        loss_fn: ``loss_fn(outputs, labels)``; default: the loss that the outputs have.
        optimizer: ``parameters -> Optimizer``.
        clip: Largest norm of all gradients together; 0: any.
        lr_scheduler: ``optimizer -> scheduler``, which steps behind it.
        loss: Which part of the outputs is the loss, as for ``build``.
    """
    model, state, chosen = copy_model(model), rng_state(), loss
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)

    def loss_of(training: bool) -> torch.Tensor:
        given = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in batch.items()
        }
        labels = batch.get("labels") if loss_fn is not None else None
        if loss_fn is not None:
            given.pop("labels", None)
        args, kwargs = call_arguments(model, given)
        outputs = model.train(training)(*args, **kwargs)
        loss = sum_of_terms(loss_fn(outputs, labels)) if loss_fn is not None else own_loss(outputs, chosen)
        if loss is None:
            advice = "a key, a position or a function of the outputs, or loss_fn=, a function of outputs and labels"
            raise VerifyError(f"the model's outputs do not show which number is the loss; give loss=, {advice}")
        return loss

    def evaluate() -> float:
        return loss_of(False).item()  # with gradients, which show the loss among the outputs

    before = {name: to_double(each.detach(), copy=True) for name, each in model.named_parameters(remove_duplicate=False)}
    try:
        first, losses, draws = evaluate(), [], False
        stepping = optimizer([each for each in model.parameters() if each.requires_grad])
        rate = lr_scheduler(stepping) if lr_scheduler is not None else None
        for _ in range(steps):
            stepping.zero_grad()
            drawn = rng_state()
            loss = loss_of(True)
            draws = draws or not same_random_state(drawn, rng_state())
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepping.step()
            if rate is not None:
                rate.step(*([loss.item()] if isinstance(rate, ReduceLROnPlateau) else []))
            losses.append(loss.item())
        evaluations = (first, evaluate())
    finally:
        set_rng_state(state)
    after = dict(model.named_parameters(remove_duplicate=False))
    updates = {name: to_double(after[name].detach()) - value for name, value in before.items()}
    return TrainingResults("", tuple(losses), evaluations, updates, draws=draws)


def to_double(tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Return a tensor's numbers in float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=copy)


def sum_of_terms(loss: Any) -> Any:
    """Return the sum of a loss in terms, as a loss function gives it that is built with ``loss_weights``; else the loss."""
    return sum(term for name, term in loss.items() if name != "loss") if isinstance(loss, Mapping) else loss


def own_loss(outputs: Any, chosen: Any = None) -> torch.Tensor | None:
    """Return the loss in outputs that have gradients: what is chosen, what is called loss, or else the only such number."""
    if callable(chosen):
        return _number(chosen(outputs))
    if chosen is not None:
        is_field = isinstance(chosen, str) and not isinstance(outputs, Mapping)
        return _number(getattr(outputs, chosen) if is_field else outputs[chosen])
    if isinstance(outputs, torch.Tensor):
        return _number(outputs)
    if hasattr(outputs, "loss") or (isinstance(outputs, Mapping) and "loss" in outputs):
        return _number(outputs.loss if hasattr(outputs, "loss") else outputs["loss"])
    plain = outputs if isinstance(outputs, Mapping | tuple | list) else getattr(outputs, "__dict__", {})
    leaves = {id(each): each for each in tree_leaves(plain) if _number(each) is not None}
    numbers = [each for each in leaves.values() if each.requires_grad] or [*leaves.values()]
    numbers = [each for each in numbers if not each.dim()] or numbers
    return numbers[0] if len(numbers) == 1 else None


def _number(value: Any) -> torch.Tensor | None:
    """Return a tensor of one floating-point number; None for anything else."""
    return value if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point() else None
