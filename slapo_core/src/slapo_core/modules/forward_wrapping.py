"""Wrap a module's forward without changing its class, its parameter names or its hooks.

Wrappers run inside ``nn.Module.__call__``: forward hooks stay outside of them, so a checkpointed module does not
repeat the collectives its hooks do.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .parameters import is_part

Wrapper = Callable[..., Any]
"""``wrapper(call, *args, **kwargs)``: ``call`` is the forward inside; a picklable function or object."""

WRAPPERS = "_slapo_wrappers"
INNER = "_slapo_inner_forward"
HOOK_TABLES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)
"""Attributes in which torch keeps the hooks of a module: dicts with a key for each hook."""


def wrap_forward(module: nn.Module, wrapper: Wrapper) -> None:
    """Put ``wrapper`` around the module's forward, outside the wrappers it already has."""
    state = module.__dict__
    if WRAPPERS not in state:
        if "forward" in state:  # somebody's own instance-level forward stays the innermost
            state[INNER] = state["forward"]
        state["forward"] = WrappedForward(wrapped_forward, module)  # unlike a method of a module, this can be pickled
    state[WRAPPERS] = (*state.get(WRAPPERS, ()), wrapper)


def forward_wrappers(module: nn.Module) -> tuple[Wrapper, ...]:
    """The wrappers around the module's forward, innermost first."""
    return module.__dict__.get(WRAPPERS, ())  # type: ignore[no-any-return]


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that this very module has been given, wrapped or not; None where it has its class's."""
    return module.__dict__.get(INNER if WRAPPERS in module.__dict__ else "forward")


def is_opaque(module: nn.Module, *, inlined: bool = False) -> bool:
    """Return whether a call of the module does more than its class's forward: by wrappers, hooks, or sharded tensors.

    Tracing keeps such a module whole: a graph would lose the first two, and use a part as if it were all. A hook with a true
    attribute ``traced`` says that it is no reason to: what it does is recorded with the forward.

    Args:
        module: The module.
        inlined: The graph would be that of a module around it. Then parts are no reason for a layer that ``is_taken_apart``,
            nor are hooks with a true attribute ``traced_with_layer``.
    """
    state = module.__dict__  # not by attributes: while a forward is traced, what it reads of these is noted
    hooks = [*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()]
    apart = inlined and is_taken_apart(module)
    return bool(
        "forward" in state
        or not all(getattr(hook, "traced", False) or (apart and getattr(hook, "traced_with_layer", False)) for hook in hooks)
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or (not apart and any(is_part(tensor) for tensor in [*state["_parameters"].values(), *state["_buffers"].values()]))
    )


def is_taken_apart(module: nn.Module) -> bool:
    """Return whether the module is a layer in several operations, as ``decompose`` makes.

    Its class has a ``_slapo_layer_class``. Its forward is there to be traced, and is as right on parts of its parameters as
    that of this class.
    """
    return _layer_class(module) is not None


def as_layer(module: nn.Module) -> nn.Module:
    """A layer that is taken apart as the layer it was, with the same attributes; any other module itself."""
    cls = _layer_class(module)
    if cls is None:
        return module
    layer: nn.Module = object.__new__(cls)
    object.__setattr__(layer, "__dict__", module.__dict__)
    return layer


def _layer_class(module: nn.Module) -> type[nn.Module] | None:
    return getattr(module.__dict__.get("_traced_class", type(module)), "_slapo_layer_class", None)


def wrapped_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = self.__dict__.get(INNER) or types.MethodType(type(self).forward, self)
    for wrapper in self.__dict__[WRAPPERS]:
        call = partial(wrapper, call)
    return call(*args, **kwargs)


class WrappedForward(partial[Any]):
    __code__ = wrapped_forward.__code__  # torch's compiler asks for that of a GraphModule's forward
