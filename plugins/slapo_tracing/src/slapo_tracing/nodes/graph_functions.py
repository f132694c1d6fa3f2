"""Functions that nodes of traced graphs call."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from slapo_core import ScheduleError, TraceError

from . import _torch_private as private
from .nested_values import contents, fill, getter


def setitem(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Run ``tensor[index] = value`` and return the tensor, so that later uses depend on the assignment."""
    tensor[index] = value
    return tensor


def set_state(root: Any, path: tuple[Any, ...], content: dict[Any, Any], drop: list[Any]) -> None:
    """Change attributes or items of the object at ``path`` inside ``root``, as the forward did."""
    target = reduce(lambda holder, key: getter(holder)(holder, key), path, root)
    fill(target, {key: part for key, part in (contents(target) or {}).items() if key not in drop} | content)


def expect_outputs(result: Any, count: int, label: str) -> None:
    """Raise ``ScheduleError`` unless a subgraph's replacement returns a tuple or list of ``count`` values."""
    if not isinstance(result, (tuple, list)) or len(result) != count:
        kind = f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, (tuple, list)) else "")
        raise ScheduleError(f"{label} returns {kind}, but the subgraph that it replaced has {count} outputs; return a tuple")


def expect(answer: Any, name: str, tensor: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """Raise ``TraceError`` if a tensor, or torch itself, gives the forward's code another answer in this call."""
    if problem := _answer_problem(answer, name, tensor, args, kwargs):
        raise TraceError(f"{problem}; trace again for calls like this, or keep what asks whole with leaf_modules")


def asks_for_gradients(module: nn.Module) -> bool:
    """Return True if a graph inside depends on gradients, and so serves only calls with gradients, or only those without."""
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    asked = {str(node.args[1]) for graph in graphs for node in graph.find_nodes(op="call_function", target=expect)}
    return not asked.isdisjoint((*private.MODES, "requires_grad", "is_leaf", "grad_fn"))


def _answer_problem(
    answer: Any, name: str, of: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    now = getattr(torch if of is None else of, name)
    now = now(*args, **kwargs) if callable(now) else now
    return None if now == answer else f"the forward asks for {name}, which is {now} in this call, traced as {answer}"


class Expectation(NamedTuple):
    """Check of ``expect`` that can be made before the graph runs.

    Attributes:
        answer: The answer during the trace.
        name: Name of the function or property that was queried, with the arguments ``args`` and ``kwargs``.
        argument: Name of the forward's argument that was queried; None: torch.
    """

    answer: Any
    name: str
    argument: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def problem(self, values: Mapping[str, Any]) -> str | None:
        return _answer_problem(self.answer, self.name, values[self.argument] if self.argument else None, self.args, self.kwargs)


class Slot:
    """Placeholder for a value that is known when the graph runs."""


class Template:
    """Object with slots, from which each call builds a new one.

    Args:
        value: The object, its tensors replaced by slots.
        slots: Its slots, in the order of the values in ``rebuild``.
        shared: Objects inside that are not copied.
    """

    def __init__(self, value: Any, slots: list[Slot], shared: list[Any]) -> None:
        self.value, self.slots, self.shared = value, slots, shared

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def rebuild(template: Template, values: list[Any]) -> Any:
    """Return a copy of the template's object with ``values`` in its slots."""
    memo = {id(slot): value for slot, value in zip(template.slots, values, strict=True)}
    memo.update((id(value), value) for value in template.shared)
    return copy.deepcopy(template.value, memo)
