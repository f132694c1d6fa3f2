"""Steps of the unmodified model in plain torch, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from slapo_core.errors import VerifyError
from slapo_core.inputs import by_position
from slapo_core.random import rng_state, set_rng_state

from .compare import OptimizerFactory
from .dropouts import same_random_state
from .model_copies import copied

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """Results of some steps.

    Args:
        target: Name of the dialect; empty for the unmodified model.
        losses: Of each step.
        evaluations: The loss before and after them, in evaluation mode.
        updates: What they added to each parameter, whole, by original name.
        copies: Likewise, of each parameter that this rank holds.
        types: Of the weights.
        draws: Whether the forward drew random numbers.
    """

    target: str
    losses: tuple[float, ...]
    evaluations: tuple[float, float]
    updates: dict[str, torch.Tensor]
    copies: list[dict[str, torch.Tensor]] = field(default_factory=list)
    types: tuple[str, ...] = ()
    draws: bool = False

    def numbers(self) -> dict[str, torch.Tensor]:
        """The losses, by what a ``Difference`` calls them."""
        before, after = self.evaluations
        losses = {f"loss of step {number}": loss for number, loss in enumerate(self.losses, 1)}
        named = {"evaluation before": before, **losses, "evaluation after": after}
        return {what: torch.tensor(value, dtype=torch.float64) for what, value in named.items()}

    def values(self) -> dict[str, torch.Tensor]:
        """All of it, by what a ``Difference`` calls it."""
        return {**self.numbers(), **{f"update of {name!r}": value for name, value in self.updates.items()}}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """At a rate of 1: what it adds is the gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def plain_steps(
    model: nn.Module,
    batch: Mapping[str, Any],
    steps: int,
    loss_fn: LossFn | None,
    optimizer: OptimizerFactory,
    clip: float = 0.0,
    lr_scheduler: Callable[[Any], Any] | None = None,
) -> Trained:
    """Train a copy of the model on the whole batch; the random state is left as it was.

    Args:
        model: The unmodified one.
        batch: Its arguments.
        steps: How many.
        loss_fn: ``loss_fn(outputs, labels)``; default: the loss that the outputs have.
        optimizer: ``parameters -> Optimizer``.
        clip: Largest norm of all gradients together; 0: any.
        lr_scheduler: ``optimizer -> scheduler``, which steps behind it.
    """
    model, state = copied(model), rng_state()
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)

    def loss_of(training: bool) -> torch.Tensor:
        given = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in batch.items()
        }
        labels = batch.get("labels") if loss_fn is not None else None
        if loss_fn is not None:
            given.pop("labels", None)
        args, kwargs = by_position(model, given)
        outputs = model.train(training)(*args, **kwargs)
        loss = loss_fn(outputs, labels) if loss_fn is not None else _own_loss(outputs)
        if loss is None:
            raise VerifyError("the model's outputs have no loss; give loss_fn=, a function of outputs and labels")
        return loss

    def evaluated() -> float:
        with torch.no_grad():
            return loss_of(False).item()

    before = {name: exactly(each.detach(), copy=True) for name, each in model.named_parameters(remove_duplicate=False)}
    try:
        first, losses, draws = evaluated(), [], False
        stepping = optimizer([each for each in model.parameters() if each.requires_grad])
        rate = lr_scheduler(stepping) if lr_scheduler is not None else None
        for _ in range(steps):
            stepping.zero_grad()
            drawn = rng_state()
            loss = loss_of(True)
            draws = draws or not same_random_state(drawn, rng_state())
            loss.backward()  # type: ignore[no-untyped-call]
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepping.step()
            if rate is not None:
                rate.step(*([loss.item()] if isinstance(rate, ReduceLROnPlateau) else []))
            losses.append(loss.item())
        evaluations = (first, evaluated())
    finally:
        set_rng_state(state)
    after = dict(model.named_parameters(remove_duplicate=False))
    updates = {name: exactly(after[name].detach()) - value for name, value in before.items()}
    return Trained("", tuple(losses), evaluations, updates, draws=draws)


def exactly(tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Its numbers in float64, or as complex ones of these."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=copy)


def _own_loss(outputs: Any) -> torch.Tensor | None:
    """The loss that Transformers' models return, or an output that is one number."""
    if isinstance(outputs, (torch.Tensor, tuple, list)):
        first = outputs if isinstance(outputs, torch.Tensor) else next(iter(outputs), None)
        return first if isinstance(first, torch.Tensor) and first.numel() == 1 else None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None
