"""The loss of one micro-batch, the model's own or that of a loss function, and its reduction over labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch

from slapo_core import BuildError

from .output_loss import OutputLoss
from .reductions import LossReduction, ReductionTracker, reduction_in_graph

LossFn = Callable[[Any, Any], torch.Tensor]
NO_GRADIENT = "the loss has no gradient: nothing that is trained is in it; unfreeze something, or call eval_batch"
"""Error of a step in training that nothing trained is in."""


class MicroBatchLoss(ABC):
    """Loss of one micro-batch, given to an engine in the place of its labels.

    The mean of these losses over the micro-batches of all replicas, and of their gradients, is that of the whole batch.
    """

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        """Run one stage of the model for this micro-batch.

        Args:
            stage: Runs it.
            index: Which stage.
        """
        return stage()

    def fail(self, error: Exception) -> None:
        """Note that this micro-batch failed before its loss, on a rank that has the last stage."""
        return

    @abstractmethod
    def loss(self, output: Any) -> torch.Tensor:
        """Return the loss, a tensor of no dimension, of the model's output."""


def run_stage(labels: Any, stage: Callable[[], Any], index: int = 0) -> Any:
    """Run one stage of the model, as the loss in the place of ``labels`` wants it, if there is one."""
    return labels.run(stage, index) if isinstance(labels, MicroBatchLoss) else stage()


def note_failure(labels: Any, error: Exception) -> None:
    """Tell the loss in the place of ``labels``, if there is one, that its micro-batch failed."""
    if isinstance(labels, MicroBatchLoss):
        labels.fail(error)


class CountedLoss:
    """Computes losses, and their reductions over labels.

    The labels of a model's own loss may be made inside of it, so the batch does not tell. To watch a model run takes up to some
    0.2 ms per layer: it is watched until a watched call shows that the loss itself tells as much, for its backward. Losses
    without a gradient, as that of text alone where only what sees images is trained, tell nothing.

    Args:
        loss_fn: ``loss_fn(outputs, labels)``; None takes the loss from the model's output.
        output_loss: Finds it there; None for one that has no option.
    """

    def __init__(self, loss_fn: LossFn | None, output_loss: OutputLoss | None = None) -> None:
        self._loss_fn, self._output_loss = loss_fn, output_loss or OutputLoss()
        self._told_by_graph = set[Hashable]()
        self._lacks_gradients = False
        self._by_graph: LossReduction = None

    def __call__(
        self, model: Callable[[], Any], labels: Any, index: int = 0, kind: Hashable = None
    ) -> tuple[torch.Tensor, LossReduction]:
        """Return the loss, a tensor of no dimension, and its reduction over labels.

        Args:
            model: Runs the model, and gives its output.
            labels: Labels for the loss function; or a ``MicroBatchLoss``, whose reduction is None.
            index: Number of the stage that ``model`` runs.
            kind: The names of its arguments, say: whether the loss has a gradient may follow from what is given.

        Raises:
            BuildError: there is no loss, or it is not one number; or it is none of which parts can be averaged.
        """
        if isinstance(labels, MicroBatchLoss):
            return labels.loss(labels.run(model, index)), None
        means = ReductionTracker()
        if self._loss_fn is not None:
            output = model()
            with means:
                loss = loss_of(output, self._loss_fn, labels)
            return loss, means.reduction_of(loss) or reduction_in_graph(loss)
        training = torch.is_grad_enabled()
        watched = not training or self._lacks_gradients or kind not in self._told_by_graph
        with means if watched else nullcontext():
            loss = self._own(model)
        by_graph = reduction_in_graph(loss, is_searched=watched or self._by_graph is not None)
        counted = (means.reduction_of(loss) or by_graph) if watched else by_graph
        if training:
            if watched and by_graph == counted:
                self._told_by_graph.add(kind)
            elif by_graph is None and self._by_graph is not None:
                self._told_by_graph.clear()
            self._lacks_gradients = self._lacks_gradients or not loss.requires_grad
            self._by_graph = by_graph
        return loss, counted

    def loss_only(self, model: Callable[[], Any], labels: Any) -> torch.Tensor:
        """Return the loss alone; see ``__call__``."""
        return self._own(model) if self._loss_fn is None else loss_of(model(), self._loss_fn, labels)

    def _own(self, model: Callable[[], Any]) -> torch.Tensor:
        return one_number(self._output_loss.of_model(model))


def check_has_gradient(loss: torch.Tensor) -> None:
    """Raise ``BuildError`` for the loss of a micro-batch in training that nothing trained is in, as engines may need one."""
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise BuildError(f"{NO_GRADIENT}; target 'torch' trains where some micro-batches only have such a loss")


def loss_of(output: Any, loss_fn: LossFn, labels: Any) -> torch.Tensor:
    """Return the loss of a model's output by a loss function.

    Raises:
        BuildError: it is not one number.
    """
    return one_number(loss_fn(output, labels))


def one_number(loss: Any) -> torch.Tensor:
    """Return a loss without dimensions.

    Raises:
        BuildError: it is not one number.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else loss
        raise BuildError(f"the loss is not one number but {shape!r}; give the model labels, or build with loss_fn=")
    return loss.reshape(()) if loss.dim() else loss  # the very tensor that a mean was noted for
