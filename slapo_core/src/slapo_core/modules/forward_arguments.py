"""Interpretation of example inputs and batches: as positional and keyword arguments, and by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..reporting.errors import BuildError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def split_inputs(example_inputs: Any, model: nn.Module | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of one call.

    Args:
        example_inputs: A mapping of keyword arguments; a tuple or list of positional ones; ``(args, kwargs)`` of a tuple or
            list and a mapping with names; or the only argument.
        model: The module to call. A mapping may then name arguments that its forward takes by position only.

    Example:
        >>> split_inputs({"input": 1}), split_inputs((1, 2)), split_inputs(((1,), {"mask": 2}))
        (((), {'input': 1}), ((1, 2), {}), ((1,), {'mask': 2}))
    """
    if isinstance(example_inputs, Mapping):
        args: Sequence[Any] = ()
        kwargs: Mapping[str, Any] = example_inputs
    elif _is_call(example_inputs):
        args, kwargs = example_inputs
    else:
        args, kwargs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,), {}
    return (tuple(args), dict(kwargs)) if args or model is None else call_arguments(model, kwargs)


def named_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Those of ``*args`` are a tuple under its name, those of ``**kwargs`` have their own names.

    Args:
        model: The module to call.
        args: Positional arguments.
        kwargs: Keyword arguments; may include some that the forward does not take, such as labels for a loss function.

    Raises:
        BuildError: more positional arguments than the forward takes, or one that is also given by keyword.

    Example:
        >>> named_inputs(nn.ReLU(), (1,), {"labels": 2})
        {'input': 1, 'labels': 2}
    """
    if not args:
        return dict(kwargs)
    signature = forward_signature(model)
    try:
        named = signature.bind_partial(*args).arguments
    except TypeError as err:
        takes = ", ".join(name for name, each in signature.parameters.items() if each.kind in _POSITIONAL) or "none"
        limit = f"the forward of {type(model).__name__} takes {takes} by position"
        got = f"{len(args)} positional arguments are given"
        raise BuildError(f"{got}, but {limit}; give the others by keyword, and leave out labels that it does not take") from err
    if twice := [name for name in named if name in kwargs]:
        raise BuildError(f"{twice[0]!r} is given by position and by keyword; give it once")
    return {**named, **kwargs}


def call_arguments(model: nn.Module, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call of ``model``.

    Arguments are passed by keyword, except those that the forward takes by position only.

    Args:
        model: The module to call.
        named: Arguments by name, as ``named_inputs`` returns them.

    Example:
        >>> call_arguments(nn.ReLU(), {"input": 1})
        ((), {'input': 1})
    """
    args: list[Any] = []
    parameters = forward_signature(model).parameters
    several = next((name for name, each in parameters.items() if each.kind is each.VAR_POSITIONAL and named.get(name)), None)
    last = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY and name in named]
    end = several or (last[-1] if last else None)
    used: set[str] = set()
    for name, each in parameters.items() if end is not None else ():
        if name in named or each.default is not each.empty:
            used.add(name)
            args += named[name] if name == several else [named.get(name, each.default)]
        if name == end:
            break
    return tuple(args), {name: value for name, value in named.items() if name not in used}


def forward_signature(model: nn.Module) -> inspect.Signature:
    """Return the signature of a module's own forward, below wrappers; for a traced module that of the forward that was
    traced.

    Example:
        >>> list(forward_signature(nn.ReLU()).parameters)
        ['input']
    """
    return inspect.signature(model.forward)


def _is_call(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (tuple, list))
    return is_pair and isinstance(value[1], Mapping) and all(isinstance(name, str) for name in value[1])
