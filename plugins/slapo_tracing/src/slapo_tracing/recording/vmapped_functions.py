"""Python functions that the forward passes to ``torch.vmap``, with the tensors that they capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class CapturedFunction:
    """Function with captured tensors, which are looked up anew at every call.

    Args:
        call: Runs the function: ``call(function, *args, **kwargs)``.
        modes: Torch function modes that it runs in.
    """

    def __init__(self, function: Any, call: Callable[..., Any], modes: tuple[TorchFunctionMode, ...]) -> None:
        self.function, self.modes, self._call = function, modes, call
        self.tensors: list[torch.Tensor] = []
        self.foreign: Any = None
        """Captured module or bound method, whose tensors cannot be replaced."""
        self._ids: set[int] = set()
        _replace_captured(function, self._find, (torch.Tensor, nn.Module, MethodType))

    def _find(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            self.foreign = tensor
        elif id(tensor) not in self._ids:
            self._ids.add(id(tensor))
            self.tensors.append(tensor)
        return tensor

    def without_tensors(self) -> CapturedFunction:
        """Return the same function for a graph, without the tensors of the traced call."""
        places = {id(tensor): _TensorIndex(index) for index, tensor in enumerate(self.tensors)}
        made = CapturedFunction(None, self._call, self.modes)
        made.function = _replace_captured(self.function, lambda tensor: places[id(tensor)])
        return made

    def __call__(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the function with these tensors in place of the captured ones."""
        function = _replace_captured(self.function, lambda place: tensors[place.index], _TensorIndex)
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            return self._call(function, *args, **kwargs)


class _TensorIndex:
    def __init__(self, index: int) -> None:
        self.index = index


def call_captured(
    function: CapturedFunction, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a captured function; a target of nodes."""
    return function(tensors, args, kwargs)


def _replace_captured(
    value: Any, change: Callable[[Any], Any], kind: Any = torch.Tensor, memo: dict[int, Any] | None = None
) -> Any:
    """Return a copy of a function in which captured values of a kind are replaced, also in functions and containers inside."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, kind):
        return change(value)

    def replace_part(part: Any) -> Any:
        return _replace_captured(part, change, kind, memo)

    if isinstance(value, FunctionType):
        return _copy_function(value, replace_part, memo)
    if type(value) is partial:
        return partial(
            replace_part(value.func),
            *map(replace_part, value.args),
            **{key: replace_part(part) for key, part in value.keywords.items()},
        )
    if type(value) in (tuple, list):
        return type(value)(map(replace_part, value))
    if type(value) is dict:
        return {key: replace_part(part) for key, part in value.items()}
    return value


def _copy_function(function: FunctionType, again: Callable[[Any], Any], memo: dict[int, Any]) -> FunctionType:
    cells = function.__closure__ or ()
    if not cells and not function.__defaults__ and not function.__kwdefaults__:
        return function
    new = tuple(CellType() for _ in cells)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, new or None)
    memo[id(function)] = made
    for cell, old in zip(new, cells, strict=True):
        if old != CellType():  # an empty cell
            cell.cell_contents = again(old.cell_contents)
    made.__defaults__, made.__kwdefaults__ = again(function.__defaults__), again(function.__kwdefaults__)
    made.__dict__.update(function.__dict__)
    return made
