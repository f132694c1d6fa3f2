"""What a model is asked for at a call, and was not when its plan was made, may be a part of a value that nobody gathers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_core import ScheduleError


@dataclass(frozen=True)
class OptionalOutput:
    """What a model returns where it is asked to.

    Args:
        option: The argument, or entry of the config, that asks for it.
        names: What Transformers calls it; those of images, say, may be whole.
        parts: What each rank has of it.
        remedy: What would work too.
    """

    option: str
    names: tuple[str, ...]
    parts: str
    remedy: str


HIDDEN_STATES = OptionalOutput(
    "output_hidden_states",
    ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"),
    "parts of the sequence",
    "sequence_parallel",
)
ATTENTIONS = OptionalOutput(
    "output_attentions",
    ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"),
    "heads",
    "give plan= without the attention",
)


class OptionalOutputGuard:
    """A forward hook of a model that is split: it refuses to return what would be a part.

    Args:
        path: Of the model, for the error.
        extras: What is a part where the model is asked for it.
    """

    traced = True  # it changes no value

    def __init__(self, path: str, extras: tuple[OptionalOutput, ...]) -> None:
        self.path, self.extras = path, extras

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Look at the names of what is returned; a tuple has none, so there it counts what was asked for.

        Raises:
            ScheduleError: an extra is among it.
        """
        named = {name for name, value in _named_values(output) if _holds_tensors(value)}
        nameless = isinstance(output, (tuple, list)) and any(map(_holds_tensors, output))
        for extra in self.extras:
            found = [name for name in extra.names if name in named]
            if nameless and not found and _is_requested(module, args, kwargs, extra.option):
                found = [extra.names[0]]
            if found:
                raise ScheduleError(
                    f"the {' and '.join(found)} that the model is asked for are this rank's {extra.parts}; "
                    f"leave out {extra.option}=True, or {extra.remedy}",
                    path=self.path,
                    primitive="tensor_parallel",
                )


def _named_values(output: Any) -> list[tuple[str, Any]]:
    """What an output holds under names, also that of the outputs in it."""
    own = list(output.items()) if isinstance(output, Mapping) else []
    inner = output if isinstance(output, (tuple, list)) else [value for _, value in own]
    return [*own, *(pair for value in inner for pair in _named_values(value))]


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(part, torch.Tensor) or _holds_tensors(part) for part in value)


def _is_requested(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], option: str) -> bool:
    """Whether the call asks, or, where it does not say, the model's config or one inside of it."""
    asked = kwargs.get(option)
    if asked is None and args:
        asked = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get(option)
    if asked is None:
        return any(getattr(getattr(inside, "config", None), option, None) for inside in module.modules())
    return asked is not False
