"""The tracers behind one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import TraceError, UnknownNameError
from ..wrapping import is_opaque
from .traced_module import TracedModule
from .value import trace_value

Leaf = Callable[[str, nn.Module], bool]
TRACERS = ("value", "fx", "export")


def trace_module(
    module: nn.Module,
    example_inputs: Any,
    *,
    leaf: Leaf = lambda name, module: False,
    tracer: str = "value",
    concrete_args: Mapping[str, Any] | None = None,
) -> TracedModule:
    args, kwargs = split_inputs(example_inputs)
    kwargs = {**kwargs, **(concrete_args or {})}
    return trace_value(module, args, kwargs, lambda path, child: "leaf" if leaf(path, child) else "inline")


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one call: a mapping is keywords, a tuple or list positions, anything else the only one."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


def trace(model, **kwargs):
    raise NotImplementedError
