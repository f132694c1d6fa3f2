"""The borders of modules as nodes of a traced graph: the places where a sync may stand.

While a model is traced inside ``marked``, what a sync would find at each border, the first floating-point input and the first
tensor of the output, passes through ``border``. A sync that stands there already does to its shape what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from slapo_core import ScheduleError

from ...syncs.sync_hooks import Sync, map_first_input, map_output

Place = tuple[str, str]
"""Path of a module, and ``"fwd_pre"`` or ``"fwd_post"``."""


def border(x: torch.Tensor, path: str, mode: str, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A value that enters or leaves a module; what ``run`` makes of it goes on."""
    if has_torch_function_unary(x):
        return handle_torch_function(border, (x,), x, path, mode, run)
    return run(x)


@dataclass(frozen=True)
class _Mark:
    """A hook that tracing sees through."""

    path: str
    mode: str
    sync: Sync | None = None
    traced = of_trace = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        try:
            return map_output(self.mark, *output) if output else map_first_input(self.mark, args, kwargs)
        except ScheduleError:  # there is no tensor: no sync can stand here
            return None

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        return border(x, self.path, self.mode, self.run) if x.dim() == 3 else x

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape that the sync gives it; nothing is sent while tracing."""
        sync = self.sync
        if sync is None:
            return x
        assert sync.axis is not None
        assert sync.group is not None
        if sync.op == "all_gather":
            return torch.cat([x] * sync.group.size(), sync.axis)
        return x.chunk(sync.group.size(), sync.axis)[0].clone()


@contextmanager
def marked(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Let what crosses the borders of these modules be seen by a tracer."""
    with_marks = list(modules)
    kept = [(module, dict(module._forward_pre_hooks), dict(module._forward_hooks)) for _, module in with_marks]
    handles = []
    try:
        for path, module in with_marks:
            if not _stand_in(module._forward_pre_hooks, path, "fwd_pre"):
                handles.append(module.register_forward_pre_hook(_Mark(path, "fwd_pre"), with_kwargs=True))
            if not _stand_in(module._forward_hooks, path, "fwd_post"):
                handles.append(module.register_forward_hook(_Mark(path, "fwd_post"), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, before, after in kept:
            module._forward_pre_hooks.update(before)
            module._forward_hooks.update(after)


def _stand_in(hooks: dict[int, Any], path: str, mode: str) -> bool:
    """Put a mark in the place of each sync; whether there was one."""
    syncs = {key: hook for key, hook in hooks.items() if isinstance(hook, Sync) and hook.op in ("all_gather", "scatter")}
    hooks.update((key, _Mark(path, mode, sync)) for key, sync in syncs.items())
    return bool(syncs)
