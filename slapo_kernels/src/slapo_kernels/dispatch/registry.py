"""Registry of the implementations of each kernel, including those of other plugins."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slapo_core import Entry, PluginError, PluginRecord, ScheduleError, UnknownNameError, default_registry, failure_reason

from .kernels import KERNELS, Function, Implementation

ENVIRONMENT_VARIABLE = "SLAPO_KERNELS"
"""Environment variable ``kernel=implementation,...``, ``*`` for all kernels that have it."""


class ImplementationRegistry:
    """Implementations that the plugins of this process provide, and those that the environment forces."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, list[Entry]]] = {}
        self._loaded: dict[tuple[str, str], Function] = {}
        for kernel in KERNELS.values():
            for each in kernel.implementations:
                self._add(Entry("implementation", f"{kernel.name}={each.name}", each, None))
        registry = default_registry()
        records = {id(record.plugin): record for record in registry.records}
        for hook in registry.hook.slapo_kernels.get_hookimpls() if hasattr(registry.hook, "slapo_kernels") else ():
            for entry in _entries_of_hook(hook.function, records[id(hook.plugin)]):
                self._add(entry)
        self.forced = _environment(self)

    def names(self, kernel: str) -> list[str]:
        """Return the names of a kernel's implementations."""
        return list(self._entries[kernel])

    def implementations(self, kernel: str, device: str) -> list[Implementation]:
        """Return a kernel's implementations in order of preference, without those that two plugins provide."""
        check_kernel(kernel)
        order = KERNELS[kernel].order(device)
        found = [entries[0].target for entries in self._entries[kernel].values() if len(entries) == 1]
        return sorted(found, key=lambda each: -1 if each.preferred else order.get(each.name, len(order)))

    def get(self, kernel: str, name: str) -> Implementation:
        """Return an implementation by name.

        Raises:
            ScheduleError: there is no such implementation.
            PluginError: two plugins provide it.
        """
        check_kernel(kernel)
        if not isinstance(name, str):
            raise ScheduleError(
                f"{name!r} is not the name of an implementation; kernel {kernel!r} has {self._join_names(kernel)}"
            )
        if name not in self._entries[kernel]:
            if any(name in those for those in self._entries.values()):  # not misspelt, but of another kernel
                raise ScheduleError(f"kernel {kernel!r} has no implementation {name!r}, but {self._join_names(kernel)}")
            unknown = UnknownNameError.of("implementation", name, self._entries[kernel], whose=f"kernel {kernel!r}")
            raise ScheduleError(str(unknown))
        entry, *others = self._entries[kernel][name]
        if others:
            raise Entry.conflict([entry, *others])
        return entry.target  # type: ignore[no-any-return]

    def load(self, implementation: Implementation) -> Function:
        """Import and return the function of an implementation; raise ``PluginError`` if the import fails."""
        key = implementation.kernel, implementation.name
        if key not in self._loaded:
            (entry,) = self._entries[key[0]][key[1]]
            self._loaded[key] = replace(entry, target=implementation.target).load()
        return self._loaded[key]

    def _join_names(self, kernel: str) -> str:
        *others, last = sorted(self._entries[kernel])
        return f"{', '.join(others)} and {last}" if others else last

    def _add(self, entry: Entry) -> None:
        kernel, _, name = entry.name.partition("=")
        self._entries.setdefault(kernel, {}).setdefault(name, []).append(entry)


def check_kernel(kernel: object) -> None:
    """Raise ``ScheduleError`` unless there is a kernel of this name."""
    if not isinstance(kernel, str):
        raise ScheduleError(f"{kernel!r} is not the name of a kernel; available: {', '.join(sorted(KERNELS))}")
    if kernel not in KERNELS:
        raise ScheduleError(str(UnknownNameError.of("kernel", kernel, KERNELS)))


@functools.cache
def implementation_registry() -> ImplementationRegistry:
    """Return the registry of this process; the first call makes it."""
    return ImplementationRegistry()


def _entries_of_hook(hook: Any, record: PluginRecord) -> list[Entry]:
    try:
        given = hook()
    except (Exception, SystemExit) as error:
        raise PluginError(f"slapo_kernels of {record} failed: {failure_reason(error)}", owner=str(record)) from error
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) for each in given.values()):
        raise PluginError(
            f"slapo_kernels of {record} returned {given!r}; return {{kernel: {{name: implementation}}}}", owner=str(record)
        )
    return [_entry(kernel, name, found, record) for kernel, those in given.items() for name, found in those.items()]


def _entry(kernel: Any, name: Any, found: Any, record: PluginRecord) -> Entry:
    try:
        check_kernel(kernel)
    except ScheduleError as error:
        raise PluginError(f"slapo_kernels of {record} names an unknown kernel: {error}", owner=str(record)) from error
    given = found if isinstance(found, Implementation) else Implementation(found)
    named = replace(given, name=name, kernel=kernel, provider=record.provider)
    checked = Entry("implementation", f"{kernel}={name}", named.target, record)
    checked.check(())
    if not isinstance(name, str) or not name.isidentifier():
        raise PluginError(f"slapo_kernels of {record} calls an implementation {name!r}, which is not a name", owner=str(record))
    return replace(checked, target=named)


def _environment(found: ImplementationRegistry) -> dict[str, str]:
    """Return kernel to the implementation that ``SLAPO_KERNELS`` forces."""
    forced: dict[str, str] = {}
    seen: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in os.environ.get(ENVIRONMENT_VARIABLE, "").split(","))):
        kernel, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ScheduleError(f"{ENVIRONMENT_VARIABLE} has {part!r}; write kernel=implementation, with commas between")
        if seen.setdefault(kernel, name) != name:
            raise ScheduleError(f"{ENVIRONMENT_VARIABLE} has both {seen[kernel]!r} and {name!r} for {kernel!r}")
        if kernel == "*":
            having = [each for each in KERNELS if name in found.names(each)]
            if not having:
                raise ScheduleError(f"{ENVIRONMENT_VARIABLE} has {part!r}, an implementation that no kernel has")
            forced = {**dict.fromkeys(having, name), **forced}
        else:
            try:
                found.get(kernel, name)
            except ScheduleError as error:
                raise ScheduleError(f"{ENVIRONMENT_VARIABLE} has {part!r}: {error}") from error
            forced[kernel] = name
    return forced
