"""Module boundaries as nodes of a traced graph, at which a sync can be placed, and the plan of a split sequence there.

Inside ``mark_boundaries``, tracing records what a sync would see at each boundary: the first floating-point input, or the
first tensor of the output. It passes through ``boundary``. An existing sync changes the shape of the value as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from slapo_core import ScheduleError

from ...syncs.sync_hooks import Sync, map_first_input, map_output

Boundary = tuple[str, str]
"""Path of a module and ``"fwd_pre"`` or ``"fwd_post"``."""


def boundary(x: torch.Tensor, path: str, mode: str, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Mark a value that enters or leaves a module, and return the result of ``run`` on it."""
    if has_torch_function_unary(x):
        return handle_torch_function(boundary, (x,), x, path, mode, run)
    return run(x)


@dataclass(frozen=True)
class _BoundaryHook:
    """Hook that tracing inlines, in place of ``sync`` if there is one."""

    path: str
    mode: str
    sync: Sync | None = None
    traced = of_trace = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        try:
            return map_output(self.mark, *output) if output else map_first_input(self.mark, args, kwargs)
        except ScheduleError:  # no tensor enters or leaves, so no sync can be placed here
            return None

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        return boundary(x, self.path, self.mode, self.run) if x.dim() == 3 else x

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape that the sync returns; nothing is sent during tracing."""
        sync = self.sync
        if sync is None:
            return x
        assert sync.axis is not None
        assert sync.group is not None
        if sync.op == "all_gather":
            return torch.cat([x] * sync.group.size(), sync.axis)
        return x.chunk(sync.group.size(), sync.axis)[0].clone()


@contextmanager
def mark_boundaries(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Record the values at the boundaries of these modules in a trace."""
    with_marks = list(modules)
    kept = [(module, dict(module._forward_pre_hooks), dict(module._forward_hooks)) for _, module in with_marks]
    handles = []
    try:
        for path, module in with_marks:
            if not _replace_syncs(module._forward_pre_hooks, path, "fwd_pre"):
                handles.append(module.register_forward_pre_hook(_BoundaryHook(path, "fwd_pre"), with_kwargs=True))
            if not _replace_syncs(module._forward_hooks, path, "fwd_post"):
                handles.append(module.register_forward_hook(_BoundaryHook(path, "fwd_post"), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, before, after in kept:
            module._forward_pre_hooks.update(before)
            module._forward_hooks.update(after)


def _replace_syncs(hooks: dict[int, Any], path: str, mode: str) -> bool:
    """Replace each gather and scatter by a boundary hook; return whether there was one."""
    syncs = {key: hook for key, hook in hooks.items() if isinstance(hook, Sync) and hook.op in ("all_gather", "scatter")}
    hooks.update((key, _BoundaryHook(path, mode, sync)) for key, sync in syncs.items())
    return bool(syncs)


Backward = Literal["split", "reduce_scatter"]


@dataclass(frozen=True)
class BoundaryCollective:
    """Collective on a value at a module boundary.

    Args:
        op: ``"scatter"`` or ``"all_gather"``.
        backward: Backward of ``all_gather``.
        axis: 1, or 0 for a value that is flattened to ``[tokens, width]``.
    """

    op: Literal["scatter", "all_gather"]
    backward: Backward = "split"
    axis: int = 1

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``sync`` beside the mode."""
        backward = {"backward": self.backward} if self.op == "all_gather" else {}
        return {"axis": self.axis, **backward}


@dataclass
class SequencePlan:
    """Plan of a split sequence.

    Args:
        collectives: Collective at each boundary.
        blocks: Paths of the repeated layers, to the shape ``[batch, sequence, width]`` of their input. Values between them are
            split.
        whole: Paths of modules inside the layers that work on the whole sequence, up to their end.
        flattens: Whether split values may be flattened to ``[tokens, width]``, so that layers see the tokens in another order.
    """

    collectives: dict[Boundary, BoundaryCollective] = field(default_factory=dict)
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    flattens: bool = False

    def block_around(self, path: str) -> str | None:
        """Return the repeated layer that is this module or contains it."""
        names = path.split(".")
        outer = (".".join(names[:count]) for count in range(1, len(names) + 1))
        return next((block for block in outer if block in self.blocks), None)

    def block_of(self, path: str) -> str | None:
        """Return the repeated layer that contains this module."""
        return None if path in self.blocks else self.block_around(path)

    def splits_output(self, node: fx.Node) -> bool:
        """Return whether the output of a row-parallel layer stays split along the sequence."""
        path = str(node.target)
        block = self.block_of(path)
        if block is None or any(path.startswith(f"{module}.") for module in self.whole):
            return False
        batch, length, width = self.blocks[block]
        return tuple(node.meta["val"].shape) in ((batch, length, width), (batch * length, width))
