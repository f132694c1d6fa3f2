"""Hooks and wrappers around a traced forward, which stay in place and run around the graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from slapo_core import HOOK_TABLES

from ..nodes.forward_wrapping import INNER, WRAPPERS, WrappedForward, forward_wrappers, wrap_forward, wrapped_forward

WRAPPER_ATTRIBUTES = ("forward", WRAPPERS, INNER)
"""Attributes in which a module's wrappers are stored."""
HOOK_ATTRIBUTES = (*HOOK_TABLES, "_is_full_backward_hook")
"""``HOOK_TABLES``, and the kind of the backward hooks."""


def share_hooks(old: nn.Module, new: nn.Module) -> None:
    """Run the hooks and wrappers of ``old`` around the forward of ``new``, which replaces it."""
    for name in HOOK_ATTRIBUTES:
        new.__dict__[name] = old.__dict__[name]  # the same objects: handles that remove a hook refer to them
    for wrapper in forward_wrappers(old):
        wrap_forward(new, wrapper)


@contextmanager
def innermost_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run ``forward`` in place of the module's own, inside of its hooks and wrappers, in a ``with`` block."""
    name = INNER if WRAPPERS in module.__dict__ else "forward"
    module.__dict__[name] = forward
    try:
        yield
    finally:
        del module.__dict__[name]


def rebind_wrappers(module: nn.Module) -> None:
    """Bind wrappers to this module's forward, after they were set on another object that shares its attributes."""
    if WRAPPERS in module.__dict__:
        module.__dict__["forward"] = WrappedForward(wrapped_forward, module)


_ENGINES = ("deepspeed.", "megatron.", "torch.distributed.")


@contextmanager
def without_engine_hooks(root: nn.Module) -> Iterator[None]:
    """Remove the hooks of engines in a ``with`` block: those of FSDP and ZeRO gather and free weights of called modules.

    Hooks that exist for one trace only, as a true attribute ``of_trace`` says, are removed too.
    """
    former: list[tuple[dict[str, Any], str, Any]] = []
    for module in root.modules():
        for name in HOOK_TABLES:
            hooks = module.__dict__[name]
            if any(map(_is_engine_hook, hooks.values())):
                former.append((module.__dict__, name, hooks))
                module.__dict__[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_engine_hook(hook))
    try:
        yield
    finally:
        for attributes, name, hooks in former:
            attributes[name] = hooks


def _is_engine_hook(hook: Any) -> bool:
    """Return True if a hook belongs to an engine, by its Python module or ``of_engine``, or exists for one trace."""
    if getattr(hook, "of_engine", False) or getattr(hook, "of_trace", False):
        return True
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(_ENGINES)


def is_hooked(module: nn.Module) -> bool:
    """Return True if any hook runs when the module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
