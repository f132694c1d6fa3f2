"""Outputs of modules, and the first one that differs from the unmodified model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ..comparison.equivalence import Tolerance
from ..ranks._torch_private import is_dry_run

Outputs = list[tuple[str, int, list[torch.Tensor]]]
"""Path, number of the call, and output tensors, in the order in which modules returned."""


def outputs_of(model: nn.Module, run: Callable[[], Any]) -> Outputs:
    """Return the output of each module while ``run`` runs the model, without modules in compiled regions or traces.

    No module gets a first hook of its own, since some compute differently with hooks. The output of a module with hooks, such
    as syncs, is recorded after these.
    """
    paths = {module: path for path, module in model.named_modules() if path}
    found: Outputs = []
    calls: dict[str, int] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if is_dry_run():  # a traced module traces itself again for a call that it has not seen
            return
        path = paths[module]
        calls[path] = calls.get(path, -1) + 1
        leaves = torch.utils._pytree.tree_leaves(output)
        found.append((path, calls[path], [each.detach().clone() for each in leaves if isinstance(each, torch.Tensor)]))

    def record_bare(module: nn.Module, args: Any, output: Any) -> None:
        if module in paths and not module._forward_hooks:
            record(module, args, output)

    handles = [register_module_forward_hook(record_bare)]
    handles += [module.register_forward_hook(record) for module in paths if module._forward_hooks]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def differing_modules(expected: Outputs, actual: Outputs, tolerance: Tolerance) -> list[str]:
    """Return the paths of modules with other outputs, in order. Outputs of other shapes, as shards, do not count."""
    known = {(path, call): tensors for path, call, tensors in expected}
    found: dict[str, None] = {}
    for path, call, tensors in actual:
        pairs = list(zip(known.get((path, call), []), tensors, strict=False))
        if any(_values_differ(one, other, tolerance) for one, other in pairs):
            found[path] = None
    return list(found)


def _values_differ(one: torch.Tensor, other: torch.Tensor, tolerance: Tolerance) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return not bool(tolerance.accepts(one, other).all())
