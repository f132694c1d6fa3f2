"""``sch.compile()``: the forward of a module through ``torch.compile``."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from slapo_core import Primitive, Schedule, ScheduleError
from slapo_tracing.graphs import TracedModule
from slapo_tracing.nodes import forward_wrappers, wrap_forward
from slapo_tracing.tracers import is_container

from ._torch_private import is_dry_run, mode_options
from .compilers import SAME_DRAWS


class CompilePrimitive(Primitive):
    """Run this module, or each module of a list, through ``torch.compile``.

    Rewrite:
        sch["layers"].compile():      y = layer(x)     -->  y = torch.compile(layer)(x)

    Modules of one class with equal shapes, dtypes and settings share compiled code, so identical layers are compiled once.
    Parameters keep their names. The innermost forward is compiled: hooks, checkpoints and other wrappers run outside, in
    whatever order they were applied. Checkpointed modules inside this one run uncompiled, unless they are compiled, too.

    Args:
        **options: Options of ``torch.compile``: ``mode``, ``dynamic``, ``fullgraph``, ``backend``, ``options``. Dropout draws
            the masks of the unmodified model for the same seed, except with another ``backend``, or with
            ``options={"fallback_random": False}``, for which inductor draws its own.

    Raises:
        ScheduleError: compiled already, no forward of its own, or options that ``torch.compile`` does not take.
    """

    name = "compile"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, **options: Any) -> None:
        if not (targets := _targets(schedule)):
            raise _error(schedule, "the list is empty; there is nothing to compile")
        for path, module in targets:
            if any(isinstance(wrapper, CompileWrapper) for wrapper in forward_wrappers(module)):
                raise _error(schedule, f"{path or 'the model'!r} is compiled already; once is enough")
            if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
                raise _error(schedule, f"a {type(module).__name__} has no forward of its own; compile the modules in it")
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise _error(schedule, f"torch.compile has no option {sorted(unknown)[0]!r}; it has {', '.join(sorted(_OPTIONS))}")
        for name, value in options.items():
            types, advice = _OPTIONS[name]
            if not (value is None or isinstance(value, types) or name == "backend" and callable(value)):
                raise _error(schedule, f"{name} is {value!r}; give {advice}")
        try:
            torch.compile(_empty_function, **options)
        except Exception as error:  # torch raises several classes for unknown values
            what, _, _ = str(error).partition(", known options are")  # hundreds
            raise _error(schedule, f"torch.compile does not take these options: {what}") from error

    @staticmethod
    def apply(schedule: Schedule, **options: Any) -> None:
        shared: dict[int, CompileWrapper] = {}
        for _, module in _targets(schedule):
            between = len(forward_wrappers(module))
            schedule.touch(module)
            wrap_forward(module, shared.setdefault(between, CompileWrapper(options, between)))


_OPTIONS: dict[str, tuple[type, str]] = {
    "backend": (str, "the name of one, see torch.compiler.list_backends(), or a function"),
    "dynamic": (bool, "True or False, or leave it out"),
    "fullgraph": (bool, "True or False"),
    "mode": (str, "a name, as 'max-autotune'"),
    "options": (dict, "a dict of options of the backend"),
}


def _empty_function() -> None:
    """Empty function by which ``torch.compile`` checks its options."""


def _targets(schedule: Schedule) -> list[tuple[str, nn.Module]]:
    """Return this module, or the members of a module list, each once, with their paths."""
    if is_container(schedule.mod):
        return [*{id(child.mod): (child.path, child.mod) for child in schedule.child.values()}.values()]
    return [(schedule.path, schedule.mod)]


class CompileWrapper:
    """Forward wrapper that compiles the innermost forward, once for all modules of a class.

    ``between`` is the number of wrappers between this one and the forward; they run uncompiled.
    """

    def __init__(self, options: dict[str, Any], between: int) -> None:
        self._options, self._between = dict(options), between
        if options.get("backend", "inductor") == "inductor":
            of_mode = mode_options(self._options.pop("mode", None))
            self._options["options"] = {**SAME_DRAWS, **of_mode, **(options.get("options") or {})}

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_dry_run():  # an outer module is compiled with this one in it
            return call(*args, **kwargs)
        return self._compile_innermost(call, self._between)(*args, **kwargs)

    def _compile_innermost(self, call: Any, wrappers: int) -> Callable[..., Any]:
        """Return the call with its innermost forward compiled."""
        if wrappers:
            return partial(call.func, self._compile_innermost(call.args[0], wrappers - 1))
        if isinstance(call, types.MethodType) and isinstance(call.__self__, TracedModule):
            return partial(self._run_traced, call.__self__)
        if isinstance(call, types.MethodType):
            return partial(self._compiled_function(call.__func__), call.__self__)
        return self._compiled_function(call)

    def _run_traced(self, module: TracedModule, *args: Any, **kwargs: Any) -> Any:
        """Run a traced module: its input check uncompiled, its graph compiled."""
        module.__dict__["through"] = self._compiled_function
        try:
            return TracedModule.forward(module, *args, **kwargs)
        finally:
            del module.__dict__["through"]

    def _compiled_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        made = _compiled_functions.setdefault(self, {})
        if function not in made:
            made[function] = torch.compile(function, **self._options)
        return made[function]


# outside the wrappers, which are part of the model: a run must not change the model's state
_compiled_functions: WeakKeyDictionary[CompileWrapper, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="compile")
