"""A backward in two parts, as schedules of ``torch.distributed.pipelining`` run it: inputs first, weights later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slapo_training import can_split_backward

from ._torch_private import backward_of_inputs, backward_of_weights


class SplitBackward:
    """The two parts of one backward; between them it holds what the runtime of the pipeline holds.

    Args:
        outputs: Outputs of the stage that need gradients, or its loss.
        gradients: Their gradients; None for a loss.
        received: Tensors that the stage received; without any that needs a gradient, the second part runs all.
        weights: Parameters of the stage.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        gradients: list[torch.Tensor] | None,
        received: Sequence[torch.Tensor],
        weights: Sequence[nn.Parameter],
    ) -> None:
        self._outputs, self._gradients, self._weights = [*outputs], gradients, weights
        self._received = [*received]
        self._groups: list[dict[str, Any]] | None = None

    @staticmethod
    def is_possible(outputs: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> bool:
        """Return True if the backward is split; the first stage runs all of it in the second part."""
        return not received or can_split_backward(outputs, received)

    def run_inputs(self) -> None:
        """Run the part for gradients of received tensors."""
        if any(each.requires_grad for each in self._received):
            if self._gradients is not None:  # as ``ExactStage``: torch detaches outputs in place, which views refuse
                self._outputs = [each.clone() if each._is_view() else each for each in self._outputs]
            self._groups = backward_of_inputs(self._outputs, self._gradients, self._received, self._weights)

    def run_weights(self) -> None:
        """Run the part for gradients of parameters, and free everything."""
        if self._groups is not None:
            backward_of_weights(self._weights, self._groups)
        elif self._outputs:
            torch.autograd.backward(self._outputs, self._gradients)
        self._outputs, self._gradients, self._received, self._groups = [], None, [], None
