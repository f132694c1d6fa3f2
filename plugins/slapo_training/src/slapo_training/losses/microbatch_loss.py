"""Loss of one micro-batch, from the model or from a loss function, and its reduction over labels."""

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
"""Message of the error for a training step without trained parameters in its loss."""


class MicroBatchLoss(ABC):
    """Loss of one micro-batch, given to an engine in the place of its labels.

    The mean of these losses over the micro-batches of all replicas is the loss of the batch, and so for their gradients.
    """

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        """Run one stage of the model for this micro-batch."""
        return stage()

    def fail(self, error: Exception) -> None:
        """Handle a failure before the loss of this micro-batch, on a rank with the last stage."""
        return

    @abstractmethod
    def loss(self, output: Any) -> torch.Tensor:
        """Return the loss of the model's output, a tensor without dimensions."""


def run_stage(labels: Any, stage: Callable[[], Any], index: int = 0) -> Any:
    """Run one stage of the model, through ``labels`` if that is a ``MicroBatchLoss``."""
    return labels.run(stage, index) if isinstance(labels, MicroBatchLoss) else stage()


def note_failure(labels: Any, error: Exception) -> None:
    """Report a failure of the micro-batch to ``labels`` if that is a ``MicroBatchLoss``."""
    if isinstance(labels, MicroBatchLoss):
        labels.fail(error)


class CountedLoss:
    """Computes losses and their reductions over labels.

    A model may make labels within its forward, so reductions cannot be read from the batch. Tracking a model's run takes
    about 0.2 ms per layer. So calls are tracked until one shows that the autograd graph of the loss gives the same reduction.
    Losses without a gradient have no graph, e.g. of text alone if only image layers are trained. Without ``loss_fn`` the loss
    is in the model's output.
    """

    def __init__(self, loss_fn: LossFn | None, output_loss: OutputLoss | None = None) -> None:
        self._loss_fn, self._output_loss = loss_fn, output_loss or OutputLoss()
        self._kinds_known_by_graph = set[Hashable]()
        self._lacks_gradients = False
        self._by_graph: LossReduction = None

    def __call__(
        self, model: Callable[[], Any], labels: Any, index: int = 0, kind: Hashable = None
    ) -> tuple[torch.Tensor, LossReduction]:
        """Return the loss, a tensor without dimensions, and its reduction over labels.

        Args:
            labels: Labels for the loss function; or a ``MicroBatchLoss``, whose reduction is None.
            index: Index of the stage that ``model`` runs.
            kind: Kind of the call, e.g. the names of its arguments, which may decide whether the loss has a gradient.

        Raises:
            BuildError: there is no loss; it is not one number; or means of its parts cannot be averaged.
        """
        if isinstance(labels, MicroBatchLoss):
            return labels.loss(labels.run(model, index)), None
        tracker = ReductionTracker()
        if self._loss_fn is not None:
            output = model()
            with tracker:
                loss = loss_of(output, self._loss_fn, labels)
            return loss, tracker.reduction_of(loss) or reduction_in_graph(loss)
        training = torch.is_grad_enabled()
        tracked = not training or self._lacks_gradients or kind not in self._kinds_known_by_graph
        with tracker if tracked else nullcontext():
            loss = self._loss_of_model(model)
        by_graph = reduction_in_graph(loss, is_searched=tracked or self._by_graph is not None)
        counted = (tracker.reduction_of(loss) or by_graph) if tracked else by_graph
        if training:
            if tracked and by_graph == counted:
                self._kinds_known_by_graph.add(kind)
            elif by_graph is None and self._by_graph is not None:
                self._kinds_known_by_graph.clear()
            self._lacks_gradients = self._lacks_gradients or not loss.requires_grad
            self._by_graph = by_graph
        return loss, counted

    def loss_only(self, model: Callable[[], Any], labels: Any) -> torch.Tensor:
        """Return the loss alone; see ``__call__``."""
        return self._loss_of_model(model) if self._loss_fn is None else loss_of(model(), self._loss_fn, labels)

    def _loss_of_model(self, model: Callable[[], Any]) -> torch.Tensor:
        return one_number(self._output_loss.of_model(model))


def check_has_gradient(loss: torch.Tensor) -> None:
    """Raise ``BuildError`` in training if no trained parameter is in the loss; some engines need a gradient."""
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise BuildError(f"{NO_GRADIENT}; target 'torch' trains where some micro-batches only have such a loss")


def loss_of(output: Any, loss_fn: LossFn, labels: Any) -> torch.Tensor:
    """Return the loss of a model's output by a loss function; raise ``BuildError`` if it is not one number."""
    return one_number(loss_fn(output, labels))


def one_number(loss: Any) -> torch.Tensor:
    """Return a loss without dimensions; raise ``BuildError`` if it is not one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else loss
        raise BuildError(f"the loss is not one number but {shape!r}; give the model labels, or build with loss_fn=")
    return loss.reshape(()) if loss.dim() else loss  # the same object, which the tracker has a record of
