"""``sch.compile()``: the forward of a module through ``torch.compile``."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from slapo_core.errors import ScheduleError
from slapo_core.primitive import Primitive
from slapo_core.schedule import Schedule
from slapo_core.wrapping import forward_wrappers, wrap_forward


class CompilePrimitive(Primitive):
    """Run this module, or each module of a list, through ``torch.compile``.

    Rewrite:
        sch["layers"].compile():      y = layer(x)     -->  y = torch.compile(layer)(x)

    Modules of one class share what is compiled, where shapes, dtypes and settings are the same: identical layers are compiled
    once. Parameters and their names stay. What is compiled is the forward itself: hooks, checkpoints and what else is around it
    run outside, in whatever order these were put on.

    Args:
        **options: Those of ``torch.compile``: ``mode``, ``dynamic``, ``fullgraph``, ``backend``, ``options``.

    Raises:
        ScheduleError: compiled already, no forward of its own, or options that ``torch.compile`` does not take.
    """

    name = "compile"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, **options: Any) -> None:
        for path, module in _targets(schedule):
            if any(isinstance(wrapper, Compiled) for wrapper in forward_wrappers(module)):
                raise _error(schedule, f"{path or 'the model'!r} is compiled already; once is enough")
            if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
                raise _error(schedule, f"a {type(module).__name__} has no forward of its own; compile the modules in it")
        unknown = set(options) - _OPTIONS
        if unknown:
            raise _error(schedule, f"torch.compile has no option {sorted(unknown)[0]!r}; it has {', '.join(sorted(_OPTIONS))}")
        try:
            torch.compile(_nothing, **options)
        except Exception as error:  # whatever torch raises on values it does not know
            raise _error(schedule, f"torch.compile does not take these options: {error}") from error

    @staticmethod
    def apply(schedule: Schedule, **options: Any) -> None:
        compiled = Compiled(options)
        for _, module in _targets(schedule):
            schedule.touch(module)
            wrap_forward(module, compiled)


_OPTIONS = {"backend", "dynamic", "fullgraph", "mode", "options"}


def _nothing() -> None:
    """Compiled by nobody; takes options."""


def _targets(schedule: Schedule) -> list[tuple[str, nn.Module]]:
    """This module, or those of a list."""
    mod = schedule.mod
    if isinstance(mod, (nn.ModuleList, nn.ModuleDict)) and type(mod).forward is nn.Module.forward:
        found = {id(child.mod): (child.path, child.mod) for child in schedule.child.values()}
        return [*found.values()]
    return [(schedule.path, mod)]


class Compiled:
    """A forward wrapper: what it wraps is compiled once for all modules of a class.

    Args:
        options: Of ``torch.compile``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward."""
        if torch.compiler.is_compiling():  # what is around is compiled, too
            return call(*args, **kwargs)
        return self._inside(call)(*args, **kwargs)

    def _inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call with its innermost forward compiled; wrappers around that, such as a checkpoint, run as they are."""
        if isinstance(call, partial):
            wrapper, inner = call.func, call.args[0]
            return partial(wrapper, self._inside(inner))
        if isinstance(call, types.MethodType):
            return partial(self._of(call.__func__), call.__self__)
        return self._of(call)

    def _of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in self._made:
            self._made[function] = torch.compile(function, **self._options)
        return self._made[function]

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_made": {}}  # made again where it is loaded or copied


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="compile")
