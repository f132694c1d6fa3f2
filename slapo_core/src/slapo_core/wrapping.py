"""Wrap a module's forward without changing its class, its parameter names or its hooks.

Wrappers run inside ``nn.Module.__call__``: forward hooks stay outside of them, so a checkpointed module does not
repeat the collectives its hooks do.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from .parameters import is_part

Wrapper = Callable[..., Any]
"""``wrapper(call, *args, **kwargs)``: ``call`` is the forward inside; a picklable function or object."""

_WRAPPERS = "_slapo_wrappers"
_INNER = "_slapo_inner_forward"
WRAPPING = ("forward", _WRAPPERS, _INNER)
"""Attributes in which a module's wrappers are kept."""


def wrap_forward(module: nn.Module, wrapper: Wrapper) -> None:
    """Put ``wrapper`` around the module's forward, outside the wrappers it already has."""
    state = module.__dict__
    if _WRAPPERS not in state:
        if "forward" in state:  # somebody's own instance-level forward stays the innermost
            state[_INNER] = state["forward"]
        state["forward"] = _Forward(_wrapped_forward, module)  # unlike a method of a module, this can be pickled
    state[_WRAPPERS] = (*state.get(_WRAPPERS, ()), wrapper)


def rebind(module: nn.Module) -> None:
    """Let the wrappers that another object of the same attributes was given run the forward of this one."""
    if _WRAPPERS in module.__dict__:
        module.__dict__["forward"] = _Forward(_wrapped_forward, module)


def forward_wrappers(module: nn.Module) -> tuple[Wrapper, ...]:
    """The wrappers around the module's forward, innermost first."""
    return module.__dict__.get(_WRAPPERS, ())  # type: ignore[no-any-return]


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that this very module has been given, wrapped or not; None where it has its class's."""
    return module.__dict__.get(_INNER if _WRAPPERS in module.__dict__ else "forward")


def is_opaque(module: nn.Module) -> bool:
    """Whether what happens when the module is called is more than its class's forward: wrappers, hooks, or sharded tensors.

    Tracing keeps such a module whole: a graph would lose the first two, and use a part as if it were all. A hook with a true
    attribute ``traced`` says that it is no reason to: what it does is recorded with the forward.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return bool(
        "forward" in module.__dict__
        or not all(getattr(hook, "traced", False) for hook in hooks)
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(is_part(tensor) for tensor in [*module._parameters.values(), *module._buffers.values()])
    )


HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)
"""Attributes in which torch keeps the hooks of a module."""


def carry_around(old: nn.Module, new: nn.Module) -> None:
    """Let hooks and wrappers of ``old`` run around the forward of ``new``, which takes its place."""
    for name in HOOKS:
        new.__dict__[name] = old.__dict__[name]  # the same objects: handles that remove a hook refer to them
    for wrapper in forward_wrappers(old):
        wrap_forward(new, wrapper)


@contextmanager
def innermost_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """``forward`` runs in the place of the module's own one, inside of its hooks and wrappers."""
    name = _INNER if _WRAPPERS in module.__dict__ else "forward"
    module.__dict__[name] = forward
    try:
        yield
    finally:
        del module.__dict__[name]


def is_hooked(module: nn.Module) -> bool:
    """Whether any hook runs when the module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _wrapped_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = self.__dict__.get(_INNER) or types.MethodType(type(self).forward, self)
    for wrapper in self.__dict__[_WRAPPERS]:
        call = partial(wrapper, call)
    return call(*args, **kwargs)


class _Forward(partial[Any]):
    __code__ = _wrapped_forward.__code__  # torch's compiler asks for that of a GraphModule's forward
