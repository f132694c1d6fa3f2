"""``pipe_split()``: a mark in a model's own forward at which a stage can end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
