"""Kinds of hooks: declared elementwise by the user, or able to read parameters and modules beside the gradient."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from slapo_core import UnknownNameError

_KIND = "_slapo_gradient_hook"
KINDS = ("elementwise", "whole")


def gradient_hook(hook: Callable[[Any], Any], kind: str = "whole") -> Callable[[Any], Any]:
    """Declare how a hook reads the gradient; return the hook for ``Tensor.register_hook``.

    Without a declaration a hook gets the whole gradient, which is right for each hook. An elementwise hook costs no message:

        weight.register_hook(slapo.gradient_hook(lambda gradient: gradient.clamp(-1, 1), kind="elementwise"))

    Args:
        hook: Hook for ``Tensor.register_hook`` or ``Tensor.register_post_accumulate_grad_hook``.
        kind: ``"elementwise"`` if each element depends on the same element only, and equally at all positions; the hook then
            gets its rank's shard of the reduced gradient. ``"whole"`` for all other hooks: masks, norms, slices.

    Raises:
        UnknownNameError: no such kind.
    """
    if kind not in KINDS:
        raise UnknownNameError.of("kind", kind, KINDS)
    try:
        setattr(hook, _KIND, kind)
    except AttributeError:  # a method or a builtin
        hook = partial(hook)
        setattr(hook, _KIND, kind)
    return hook


def is_elementwise(hook: object) -> bool:
    return getattr(hook, _KIND, None) == "elementwise"


_MOST = 2000
"""Largest number of searched objects."""


def reads_weights(hook: Any) -> bool:
    """Return True if a hook can reach a module or parameter, and so may need whole weights.

    The search covers closures, bound objects, defaults, and globals that the hook names. After ``_MOST`` objects it gives True.
    """
    waiting, seen = [hook], dict[int, Any]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, (nn.Module, nn.Parameter, torch.optim.Optimizer)) or len(seen) > _MOST:
            return True
        waiting += _referenced_values(found)
    return False


def _referenced_values(found: Any) -> Iterable[Any]:
    if isinstance(found, (str, bytes, int, float, complex, type(None), torch.Tensor, type, types.ModuleType, torch.device)):
        return ()
    if isinstance(found, types.FunctionType):
        return _of_function(found)
    if isinstance(found, types.MethodType):
        return (found.__self__, found.__func__)
    if isinstance(found, functools.partial):
        return (found.func, *found.args, *found.keywords.values(), *vars(found).values())
    if isinstance(found, Mapping):
        return (*found.keys(), *found.values())
    if isinstance(found, (list, tuple, set, frozenset)):
        return found
    if isinstance(found, weakref.ref):
        return (found(),)
    call = getattr(type(found), "__call__", None)  # noqa: B004  calls of an instance use its class
    slots = (getattr(found, name, None) for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ()))
    return (*getattr(found, "__dict__", {}).values(), *slots, *([call] if isinstance(call, types.FunctionType) else []))


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    package = (function.__module__ or "").partition(".")[0]
    if package in ("torch", "numpy") or package in sys.stdlib_module_names - {"__main__"}:
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from getattr(function, "__dict__", {}).values()
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
