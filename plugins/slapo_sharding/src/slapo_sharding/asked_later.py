"""What a model is asked for at a call, and was not when its plan was derived, may be a part of a value that nobody gathers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from slapo_core.errors import ScheduleError

_BETWEEN_LAYERS = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
"""What Transformers calls them; those of images, say, may be whole."""


class WholeOutputs:
    """A forward hook of a model whose sequence is split: it refuses to return the values between all layers.

    A plan is derived only where the dry run returns whole values, so these cannot have been among them.

    Args:
        path: Of the model, for the error.
    """

    traced = True  # it changes no value

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Look at the names of what is returned.

        Raises:
            ScheduleError: hidden states are among it.
        """
        found = output.items() if isinstance(output, Mapping) else ()
        names = [name for name, value in found if name in _BETWEEN_LAYERS and isinstance(value, (tuple, list))]
        if names:
            raise ScheduleError(
                f"the {' and '.join(names)} that the model is asked for are this rank's parts of the sequence; "
                "leave out output_hidden_states=True, or sequence_parallel",
                path=self.path,
                primitive="tensor_parallel",
            )
