"""Random numbers under tensor parallelism: each rank has its own masks for sharded values; masks for whole values are equal.

The random operations are those of a traced graph, or, for a published plan, dropouts with the names that Transformers uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_core import Schedule
from slapo_tracing.nodes import is_mode_node

from ...splitting import attention_heads
from ..derivation.replicated_modules import plan_error
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import as_meta
from ..local_sizes.adapted_modules import is_inside

_INSIDE = ("attn_dropout", "attention_dropout")
_OUTSIDE = ("resid_dropout", "resid_pdrop")
_RATES = ("attention_dropout", "attn_dropout", "dropout", "activation_dropout", "hidden_dropout")


class MixedRandomOps(ValueError):
    """Error of a module whose forward draws random numbers for sharded and for whole values; ``node`` is one of the former."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.node = node


class _RandomOpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records whether a random operation ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.drew |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def is_random(module: nn.Module, node: fx.Node) -> bool:
    """Return whether a node draws random numbers, found by running it on meta tensors."""
    if not node.op.startswith("call") or is_mode_node(node):
        return False
    inputs = [other.meta.get("val") for other in node.all_input_nodes]
    if not all(isinstance(value, torch.Tensor) for value in inputs):
        return False
    values = {other: as_meta(other.meta["val"]) for other in node.all_input_nodes}
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    # an operation that fails without data has drawn before, or is not random
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _RandomOpRecorder() as watch, suppress(Exception):
        _run(module, node, args, kwargs)
    return bool(watch.drew)


def _run(module: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> None:
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        state = {name: as_meta(value) for name, value in [*called.named_parameters(), *called.named_buffers()]}
        functional_call(called, state, args, kwargs)
    elif node.op == "call_method":
        getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        node.target(*args, **kwargs)  # type: ignore[operator]


def find_rng_forks(layouts: Layouts, graphs: Collection[str] = ()) -> Iterator[tuple[str, bool]]:
    """Yield the modules whose random numbers must be forked, and whether each is inside one and must stay outside of the fork.

    Of the modules that run from ``graphs``, only calls in them, such as layers, have random numbers of their own. Raises
    ``MixedRandomOps`` if a forward draws for sharded and for whole values.
    """
    # the tracer marks every operation that may be random, such as attention with a rate of 0, so marked nodes are run
    drawing = [node for node in layouts.graph.nodes if node.meta.get("draws", True) and is_random(layouts.traced, node)]
    inside = {_module_to_fork(node, graphs): node for node in drawing if _is_sharded(layouts, node)}
    outside = {_module_to_fork(node, graphs): node for node in drawing if not _is_sharded(layouts, node)}
    if both := sorted(inside.keys() & outside.keys()):
        where = outside[both[0]].meta.get("source")
        raise MixedRandomOps(f"{both[0]!r} draws random numbers for sharded and for whole values ({where})", inside[both[0]])
    yield from ((path, False) for path in inside)
    yield from ((path, True) for path in outside if any(path.startswith(f"{fork}.") or not fork for fork in inside))


def _module_to_fork(node: fx.Node, graphs: Collection[str]) -> str:
    if node.op == "call_module":
        return str(node.target)
    path = str(node.meta.get("module", ""))
    return next((each for each in graphs if is_inside(path, each)), path)


def _is_sharded(layouts: Layouts, node: fx.Node) -> bool:
    return node in layouts.branch_of or any(other in layouts.local_shapes for other in node.all_input_nodes)


def fork_dropouts(schedule: Schedule, paths: Iterable[str]) -> None:
    """Fork the random numbers of the attention modules around the split modules at ``paths``.

    Raises:
        ScheduleError: a dropout may see sharded or replicated values.
    """
    owners = {path.rpartition(".")[0]: None for path in sorted(paths)}
    for path in owners:
        handle = schedule[path] if path else schedule
        names = set(handle.mod._modules)
        if any(attention_heads.makes_heads(handle.mod, name) for name in names):
            _fork_attention(handle)
        elif not {"c_fc", "c_proj", "dropout"} <= names:  # GPT-2's comes after the output projection
            _refuse(handle, [*_active_dropouts(handle.mod), *_rates(handle.mod)])


def _fork_attention(handle: Schedule) -> None:
    active = _active_dropouts(handle.mod)
    _refuse(handle, [name for name in active if name not in (*_INSIDE, *_OUTSIDE)])
    if not _rates(handle.mod) and not any(name in _INSIDE for name in active):
        return
    handle.fork_rng()
    for name in active:
        if name in _OUTSIDE:
            handle[name].fork_rng(outside=True)


def _active_dropouts(module: nn.Module) -> list[str]:
    """Return the names of the dropout children of a module with a rate above 0."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)
    return [name for name, child in module.named_children() if isinstance(child, kinds) and child.p > 0]


def _rates(module: nn.Module) -> list[str]:
    """Return the names of the rates above 0 that a module passes to a dropout function."""
    return [name for name in _RATES if isinstance(rate := module.__dict__.get(name), float) and rate > 0]


def _refuse(handle: Schedule, names: list[str]) -> None:
    if names:
        what = f"{names[0]!r} may see sharded or replicated values"
        raise plan_error(handle, f"{what}; set it to 0, or use shard() and fork_rng()")
