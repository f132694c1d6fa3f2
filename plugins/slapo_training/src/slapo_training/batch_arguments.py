"""Conversion of a user's batch to the model's arguments by name and the labels of a loss function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from slapo_core import BuildError, forward_signature, named_inputs

from .batches.microbatches import Batch
from .options.common_options import CommonOptions

__all__ = ["arguments_of"]

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_LISTS = re.compile(r"\b(list|tuple|sequence|iterable)\b", re.IGNORECASE)


def arguments_of(model: nn.Module, args: Sequence[Any], given: Mapping[str, Any], options: CommonOptions) -> Batch:
    """Return the arguments of a batch by name, with the labels of a loss function under ``labels``.

    A single tuple, list or mapping is a batch of a ``DataLoader`` and contains the arguments. With ``loss_fn`` the labels are
    called ``labels``, or are the only keyword argument that the forward does not accept, or the last positional argument. With
    ``loss_over`` the last positional argument is taken only if the forward does not accept as many.

    Args:
        model: The unmodified model, or a module with its forward's signature.

    Raises:
        BuildError: the forward does not accept as many arguments, or an argument is given twice.
    """
    parameters = forward_signature(model).parameters
    for each in (*args, *given.values()):
        if isinstance(each, DataLoader | Iterator):
            raise BuildError(f"a {type(each).__name__} is given; give one batch of it, as in: for batch in loader: ...")
    has_labels, needs_labels = options.loss_fn is not None, options.loss_fn is not None and options.loss_over is None
    call = _unpack_batch(parameters, tuple(args), dict(given), has_labels, needs_labels)
    number = sum(each.kind in _POSITIONAL for each in parameters.values())
    is_open = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    if not has_labels and len(call[0]) == number + 1 > 1 and not is_open:
        raise BuildError(
            f"{number + 1} values are given, but the forward of {type(model).__name__} takes {', '.join(parameters)}; "
            "if the last one has labels, build with loss_fn=, a function of (outputs, labels)"
        )
    if not has_labels or "labels" in call[1]:
        return named_inputs(model, *call)
    args, kwargs, labels = _split_labels(model, *call, needs_labels)
    named = named_inputs(model, args, kwargs)
    return named if labels is None else {**named, "labels": labels[0]}


def _unpack_batch(
    parameters: Mapping[str, inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_labels: bool,
    needs_labels: bool,
) -> _Call:
    """Return the arguments of a batch that is the only argument."""
    args, kwargs = _unpack_mapping(parameters, args, kwargs)
    if len(args) != 1 or kwargs or not isinstance(args[0], tuple | list):
        return args, kwargs
    positional = [each for each in parameters.values() if each.kind in _POSITIONAL]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()):
        return args, kwargs  # a sequence may be one argument or all of them
    number, most = len(args[0]), len(positional) + has_labels
    if most < 2 or (positional and _is_list(positional[0]) and not needs_labels):
        return args, kwargs
    if number > most:
        names = ", ".join(each.name for each in positional)
        raise BuildError(
            f"the batch is a {type(args[0]).__name__} of {number}, but the forward takes {names} by position"
            f"{' beside labels' * has_labels}; a sequence that is an argument itself has to be given by keyword"
        )
    return _unpack_mapping(parameters, tuple(args[0]), {})


def _unpack_mapping(parameters: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """Return the arguments of a mapping that is the only argument, if the forward has a parameter of one of its names."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
        return args, kwargs
    names = {name for name, each in parameters.items() if each.kind in _POSITIONAL or each.kind is each.KEYWORD_ONLY}
    is_batch = all(isinstance(name, str) for name in args[0]) and bool(names & args[0].keys())
    return ((), dict(args[0])) if is_batch else (args, kwargs)


def _split_labels(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], needs_labels: bool
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any] | None]:
    """Return the arguments without the labels, and the labels in a tuple, or None."""
    signature = forward_signature(model)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    others = [name for name in kwargs if name not in signature.parameters and not takes_any]
    if len(others) == 1:
        return args, {name: value for name, value in kwargs.items() if name not in others}, (kwargs[others[0]],)
    fewer = _unpack_mapping(signature.parameters, args[:-1], kwargs)
    if len(args) > 1 and _binds(signature, *fewer) and (needs_labels or not _binds(signature, args, kwargs)):
        return *fewer, (args[-1],)
    return args, kwargs, None


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_list(parameter: inspect.Parameter) -> bool:
    return parameter.annotation is not parameter.empty and _LISTS.search(str(parameter.annotation)) is not None
