"""Modules that a graph must call as a whole, and layers that ``decompose`` split into several operations."""

from __future__ import annotations

from torch import nn

from slapo_core import is_sharded


def is_opaque(module: nn.Module, *, inlined: bool = False) -> bool:
    """Return True if a call of the module does more than its class's forward: by wrappers, hooks, or sharded tensors.

    Tracing keeps such a module whole. A graph would lose wrappers and hooks, and use a shard as if it were the full tensor. A
    hook with a true attribute ``traced`` does not count, since it is recorded with the forward.

    Args:
        module: The module.
        inlined: True if the graph is that of a module around it. Then sharded tensors of a layer that ``is_taken_apart`` do not
            count, nor do hooks with a true attribute ``traced_with_layer``.
    """
    state = module.__dict__  # not by attributes: while a forward is traced, what it reads of these is noted
    hooks = [*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()]
    apart = inlined and is_taken_apart(module)
    return bool(
        "forward" in state
        or not all(getattr(hook, "traced", False) or (apart and getattr(hook, "traced_with_layer", False)) for hook in hooks)
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or (not apart and any(is_sharded(tensor) for tensor in [*state["_parameters"].values(), *state["_buffers"].values()]))
    )


def is_taken_apart(module: nn.Module) -> bool:
    """Return True if the module is a layer in several operations, as ``decompose`` makes.

    Its class has a ``_slapo_layer_class``. Its forward can be traced, and computes on shards what that class's forward does.
    """
    return _layer_class(module) is not None


def as_layer(module: nn.Module) -> nn.Module:
    """Return a decomposed layer as the layer it was, with the same attributes; any other module itself."""
    cls = _layer_class(module)
    return module if cls is None else as_original(module, cls)


def as_original(module: nn.Module, cls: type[nn.Module] | None = None) -> nn.Module:
    """Return a view of a module in another class, by default the one it was traced from, which shares its attributes."""
    original: nn.Module = object.__new__(cls or module.__dict__.get("_traced_class", type(module)))
    object.__setattr__(original, "__dict__", module.__dict__)
    return original


def _layer_class(module: nn.Module) -> type[nn.Module] | None:
    return getattr(module.__dict__.get("_traced_class", type(module)), "_slapo_layer_class", None)
