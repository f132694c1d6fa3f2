"""Guard against optional outputs that are shards, for calls that ask for more than the example inputs of the plan did."""

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
    """Output that a model returns on request.

    Args:
        option: Argument, or entry of the config, that requests it.
        names: Names that Transformers gives it. Others, such as those of images, may be whole.
        parts: The shard that each rank has, for the error.
        remedy: Alternative, for the error.
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
    """Forward hook of the split model at ``path`` that refuses to return the optional outputs that are shards."""

    traced = True  # tracing may inline it, as it changes no value

    def __init__(self, path: str, extras: tuple[OptionalOutput, ...]) -> None:
        self.path, self.extras = path, extras

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Check the names of the outputs. A tuple has no names, so there the request decides.

        Raises:
            ScheduleError: an optional output that is a shard is returned.
        """
        named = {name for name, value in _named_values(output) if _holds_tensors(value)}
        nameless = isinstance(output, (tuple, list)) and any(map(_holds_tensors, output))
        for extra in self.extras:
            found = [name for name in extra.names if name in named]
            if nameless and not found and _is_requested(module, args, kwargs, extra.option):
                found = [extra.names[0]]
            if found:
                raise ScheduleError(
                    f"the {' and '.join(found)} requested from the model are this rank's {extra.parts}; "
                    f"leave out {extra.option}=True, or {extra.remedy}",
                    path=self.path,
                    primitive="tensor_parallel",
                )


def _named_values(output: Any) -> list[tuple[str, Any]]:
    """Return the named values of an output and of the outputs nested in it."""
    own = list(output.items()) if isinstance(output, Mapping) else []
    inner = output if isinstance(output, (tuple, list)) else [value for _, value in own]
    return [*own, *(pair for value in inner for pair in _named_values(value))]


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(part, torch.Tensor) or _holds_tensors(part) for part in value)


def _is_requested(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], option: str) -> bool:
    """Return whether the call requests an option, or, if the call has no such argument, a config in the model does."""
    asked = kwargs.get(option)
    if asked is None and args:
        asked = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get(option)
    if asked is None:
        return any(getattr(getattr(inside, "config", None), option, None) for inside in module.modules())
    return asked is not False
