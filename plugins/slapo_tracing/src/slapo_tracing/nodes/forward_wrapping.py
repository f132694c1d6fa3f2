"""Wrappers of a module's forward that change neither its class nor its parameter names nor its hooks.

Wrappers run inside ``nn.Module.__call__`` and inside of forward hooks. A checkpointed module therefore does not repeat the
collectives of its hooks.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Wrapper = Callable[..., Any]
"""``wrapper(call, *args, **kwargs)``, where ``call`` is the wrapped forward; a picklable function or object."""

WRAPPERS = "_slapo_wrappers"
INNER = "_slapo_inner_forward"


def wrap_forward(module: nn.Module, wrapper: Wrapper, *, innermost: bool = False) -> None:
    """Wrap the module's forward with ``wrapper``, outside of the existing wrappers, or inside of all."""
    state = module.__dict__
    if WRAPPERS not in state:
        if "forward" in state:  # somebody's own instance-level forward stays the innermost
            state[INNER] = state["forward"]
        state["forward"] = WrappedForward(wrapped_forward, module)  # unlike a method of a module, this can be pickled
    before = state.get(WRAPPERS, ())
    state[WRAPPERS] = (wrapper, *before) if innermost else (*before, wrapper)


def forward_wrappers(module: nn.Module) -> tuple[Wrapper, ...]:
    """Return the wrappers of the module's forward, innermost first."""
    return module.__dict__.get(WRAPPERS, ())  # type: ignore[no-any-return]


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that was set on this module, wrapped or not; None if it has its class's."""
    return module.__dict__.get(INNER if WRAPPERS in module.__dict__ else "forward")


def wrapped_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call = self.__dict__.get(INNER) or types.MethodType(type(self).forward, self)
    for wrapper in self.__dict__[WRAPPERS]:
        call = partial(wrapper, call)
    return call(*args, **kwargs)


class WrappedForward(partial[Any]):
    """Wrapped forward, with the signature of the forward inside."""

    __code__ = wrapped_forward.__code__  # torch's compiler asks for that of a GraphModule's forward

    @property
    def __signature__(self) -> inspect.Signature:
        module = self.args[0]
        return inspect.signature(own_forward(module) or types.MethodType(type(module).forward, module))
