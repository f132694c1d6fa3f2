"""``pipe_split()``: a mark in a model's own forward at which a stage can end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import handle_torch_function, has_torch_function

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


class MarkRecorder:
    """Context manager that records the modules whose forwards reach a mark while a model runs."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.found: list[str] = []
        """Per mark the path of the module whose forward has it, in the order of the last run."""
        self._paths = {id(module): path for path, module in root.named_modules()}
        self._running: list[nn.Module] = []

    def __enter__(self) -> MarkRecorder:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._begin).remove)
            stack.callback(register_module_forward_hook(self._end, always_call=True).remove)
            _mark_callbacks.append(self._seen)
            stack.callback(_mark_callbacks.remove, self._seen)
            self._close = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._close.close()

    def _begin(self, module: nn.Module, _: Any) -> None:
        if module is self.root:
            self.found.clear()  # tracing may run it several times
            self._running.clear()
        self._running.append(module)

    def _end(self, *_: Any) -> None:
        self._running.pop()

    def _seen(self) -> None:
        known = (self._paths[id(module)] for module in reversed(self._running) if id(module) in self._paths)
        self.found += itertools.islice(known, 1)
