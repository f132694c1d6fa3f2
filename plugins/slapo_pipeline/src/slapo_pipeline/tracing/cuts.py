"""Cuts: the modules where a pipeline stage ends or begins, and the marks of ``pipe_split()`` in forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import handle_torch_function, has_torch_function

from slapo_core import Step

CUT_PIPELINE_STAGE = "cut_pipeline_stage"
CUT_AT_MARKS = "cut_at_marks"
Where = Literal["after", "before"]


class Cut(str):
    """The path of a module where a stage ends or begins.

    Args:
        where: ``"after"`` it, ``"before"`` it, or the number of a mark in its own forward.
    """

    where: Where | int

    def __new__(cls, path: str, where: Where | int = "after") -> Cut:
        cut = super().__new__(cls, path)
        cut.where = where
        return cut


def cut_where(path: str) -> Where | int:
    """Return the ``where`` of a ``Cut``; a plain path cuts after its module."""
    return path.where if isinstance(path, Cut) else "after"


def is_at_mark(path: str) -> bool:
    """Return whether the cut lies inside the module's own forward."""
    return isinstance(cut_where(path), int)


def cuts_of_steps(steps: Iterable[Step]) -> list[str]:
    """Return the cuts of these steps and of their child steps, in the order in which they were taken."""
    found: list[str] = []
    for step in steps:
        if step.name == CUT_PIPELINE_STAGE:
            found.append(Cut(step.path, *step.args, **step.kwargs))
        elif step.name == CUT_AT_MARKS:
            found += [Cut(step.path, number) for number in step.args]
        found += cuts_of_steps(step.children)
    return found


_mark_callbacks: list[Callable[[], None]] = []


def pipe_split() -> None:
    """Mark a place in a forward for ``sch.cut_at_marks()``, which ends a pipeline stage there. It does nothing else.

    Example:
        def forward(self, x):
            x = self.encode(x)
            pipe_split()
            return self.decode(x)
    """
    mark()


def mark() -> torch.Tensor:
    """Return an empty, unused tensor: tracing records this call as the mark."""
    if has_torch_function((None,)):  # a torch function mode is active, such as the tracer's
        recorded: torch.Tensor = handle_torch_function(mark, (None,))
        return recorded
    for watcher in _mark_callbacks:
        watcher()
    return torch.empty(0)


def is_mark(node: fx.Node) -> bool:
    return node.target is mark


@contextmanager
def record_marks(root: nn.Module) -> Iterator[list[str]]:
    """Record per mark the path of the module whose forward reaches it, in the order of the model's last run inside."""
    found: list[str] = []
    paths = {id(module): path for path, module in root.named_modules()}
    running: list[nn.Module] = []

    def begin(module: nn.Module, _: Any) -> None:
        if module is root:
            found.clear()  # tracing may run it several times
            running.clear()
        running.append(module)

    def end(*_: Any) -> None:
        running.pop()

    def seen() -> None:
        known = (paths[id(module)] for module in reversed(running) if id(module) in paths)
        found.extend(itertools.islice(known, 1))

    _mark_callbacks.append(seen)
    try:
        with register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True):
            yield found
    finally:
        _mark_callbacks.remove(seen)
