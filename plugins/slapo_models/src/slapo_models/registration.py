"""Registration of schedules in this process, for notebooks and tests; plugins use the hook ``slapo_models``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slapo_core import Entry, Registry, ScheduleError, default_registry

Function = TypeVar("Function", bound=Callable[..., Any])

REGISTERED_SCHEDULES: dict[str, Entry] = {}
"""Key to the function that was registered in this process."""


def register_schedule(key: str | None = None) -> Callable[[Function], Function]:
    """Register a function ``(model_or_schedule, **config) -> Schedule`` in this process, by a decorator.

    Registering a function of the same module and name once more, as notebooks do, replaces it.

    Args:
        key: What ``apply_schedule`` is to call it; by default the name of the file the function is in, without its suffix.

    Raises:
        PluginError: a plugin, or another function, has this key.
    """
    if callable(key):
        raise ScheduleError(
            "is given a function; write @register_schedule() or @register_schedule('key')", primitive="register_schedule"
        )

    def register(function: Function) -> Function:
        entry = Entry("model", Path(inspect.getfile(function)).stem if key is None else key, function)
        entry.check(())
        before = REGISTERED_SCHEDULES.get(entry.name)
        others = [each for each in default_registry().entries("model") if each.name == entry.name]
        if before is not None and _import_path(before.target) != _import_path(function):
            others.append(before)
        if others:
            raise Entry.conflict([*others, entry])
        REGISTERED_SCHEDULES[entry.name] = entry
        return function

    return register


def schedule_names(registry: Registry) -> list[str]:
    """Return all keys, including those of this process."""
    return sorted({*REGISTERED_SCHEDULES, *(entry.name for entry in registry.entries("model"))})


def _import_path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"
