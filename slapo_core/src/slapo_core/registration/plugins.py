"""Discovery and loading of plugins, which are entry points. One that fails is recorded; the others work.

Environment:
    SLAPO_DISABLE_PLUGINS: Entry-point names, separated by commas, that are not imported.
    SLAPO_STRICT_PLUGINS: ``1`` raises an error for a plugin that fails.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import pluggy

from ..reporting.errors import PluginError, SlapoError, UnknownNameError, failure_reason
from ..reporting.logger import get_logger


@dataclass
class PluginRecord:
    """One plugin and the state of its loading.

    Args:
        name: Entry-point name.
        entry_point: Its entry point; None for an object that was passed to the registry.
        plugin: The module or object with the hook implementations; None until it is imported.
        disabled: True if ``SLAPO_DISABLE_PLUGINS`` names it.
        loaded: True if its hooks are called.
        problems: Reasons why it did not load, or why names it provides cannot be used.

    Example:
        >>> record = next(record for record in default_registry().records if record.name == "core")
        >>> record.loaded, record.distribution, record.failure
        (True, 'slapo-core', None)
    """

    name: str
    entry_point: importlib.metadata.EntryPoint | None = None
    plugin: object | None = None
    disabled: bool = False
    loaded: bool = False
    problems: list[str] = field(default_factory=list)

    @cached_property
    def distribution(self) -> str:
        """Name of the distribution, read on demand from its metadata file; the plugin's own name if it is not installed."""
        return self._metadata("Name") or self.name

    @cached_property
    def version(self) -> str:
        """Version of the distribution; empty if there is none."""
        return self._metadata("Version")

    @cached_property
    def provider(self) -> str:
        """Distribution and version, e.g. ``"slapo-core 0.1.0"``."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def failure(self) -> str | None:
        """One sentence on why its hooks are not called; None if they are."""
        failed = f"{self} did not load: {'; '.join(self.problems)}"
        return f"{self} is disabled by SLAPO_DISABLE_PLUGINS" if self.disabled else None if self.loaded else failed

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.provider})"

    def _metadata(self, key: str) -> str:
        dist = self.entry_point.dist if self.entry_point else None
        try:
            return str(dist.metadata[key] or "") if dist else ""
        except Exception:  # unreadable metadata must not hide the plugin's own error
            return ""


def discover(group: str) -> list[PluginRecord]:
    """Return the installed plugins, which are entry points of a group, sorted by name. Imports none."""
    try:
        found = [PluginRecord(point.name, point) for point in importlib.metadata.entry_points(group=group)]
    except Exception:  # one malformed entry_points.txt anywhere on the path stops the fast scan
        found = list(_discover_one_by_one(group))
    disabled = {name.strip() for name in os.environ.get("SLAPO_DISABLE_PLUGINS", "").split(",")}
    for record in found:
        record.disabled = record.name in disabled
    names = [record.name for record in found]
    for name in sorted(disabled.difference(names, [""])):
        get_logger().warning("%s", UnknownNameError.of("plugin", name, names, ["SLAPO_DISABLE_PLUGINS names it"]))
    return sorted(found, key=lambda record: record.name)


def _discover_one_by_one(group: str) -> Iterator[PluginRecord]:
    seen: set[str] = set()
    for dist in importlib.metadata.distributions():
        name = str(dist)
        try:
            name = dist.metadata["Name"]
            if name not in seen:
                seen.add(name)
                yield from [PluginRecord(point.name, point) for point in dist.entry_points if point.group == group]
        except Exception as error:
            get_logger().warning("the entry points of %s cannot be read: %s", name, failure_reason(error))


class Plugins:
    """The plugins of one registry, and the pluggy manager that calls their hooks.

    Args:
        specs: Module with core's hook specifications, and with ``NAME``, the group of the entry points.
        given: Plugin objects to use with core instead of the installed ones. A failure of one of these is raised.
    """

    def __init__(self, specs: ModuleType, given: Iterable[object] | None = None) -> None:
        self.strict = given is not None or os.environ.get("SLAPO_STRICT_PLUGINS", "0") not in ("", "0")
        self.manager = pluggy.PluginManager(specs.NAME)
        self.manager.add_hookspecs(specs)
        self.manager.add_hookcall_monitoring(lambda *call: None, self._add_owner)
        self.records = discover(specs.NAME)
        if given is not None:
            own = [PluginRecord(f"{getattr(it, '__name__', type(it).__name__)}#{at}", plugin=it) for at, it in enumerate(given)]
            self.records = [record for record in self.records if record.name == "core"] + own
        # each step for all plugins before the next, since a plugin may specify the hooks of another
        for step in (self._refuse_equal_names, self._import, self._register, self._refuse_unknown_hooks):
            for record in self._loadable_records():
                with self.guard(record):
                    step(record)
        for record in self._loadable_records():
            record.loaded = True

    @contextmanager
    def guard(self, record: PluginRecord) -> Iterator[None]:
        """Record an error of the block as a failure of this plugin."""
        try:
            yield
        except (Exception, SystemExit) as error:
            record.problems.append(failure_reason(error))
            record.loaded = False
            if record.plugin is not None and self.manager.is_registered(record.plugin):
                self.manager.unregister(record.plugin)
            if self.strict:
                raise PluginError(str(record.failure), owner=str(record)) from error
            get_logger().warning("%s", record.failure)

    def hook_error(self, hook: str, plugin: object, error: BaseException) -> tuple[PluginRecord, PluginError]:
        """Return the plugin whose hook raised ``error``, and the error that names it."""
        record = next(record for record in self.records if record.plugin is plugin)
        return record, PluginError(f"{hook} of {record} failed: {failure_reason(error)}", owner=str(record))

    def _add_owner(self, outcome: pluggy.Result[object], hook: str, impls: Sequence[pluggy.HookImpl], _: object) -> None:
        """Wrap an error that a hook raises in one that names its plugin. A ``SlapoError`` is left as it is."""
        if isinstance(error := outcome.exception, Exception) and not isinstance(error, SlapoError):
            codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            for impl in impls:
                if getattr(impl.function, "__code__", None) in codes:
                    problem = self.hook_error(hook, impl.plugin, error)[1]
                    problem.__cause__ = error
                    outcome.force_exception(problem)

    def _loadable_records(self) -> list[PluginRecord]:
        return [record for record in self.records if not record.disabled and not record.problems]

    def _refuse_equal_names(self, record: PluginRecord) -> None:
        same = [other for other in self.records if other.name == record.name and not other.disabled]
        if len(same) > 1:
            names = " and ".join(sorted(other.provider for other in same))
            raise PluginError(f"{names} have the same plugin name; uninstall one", owner=str(record))

    def _import(self, record: PluginRecord) -> None:
        """Import a plugin, and add the hook specifications that it brings."""
        plugin: Any = record.entry_point.load() if record.entry_point else record.plugin
        record.plugin = plugin
        if self._is_hook_implementation(plugin, "slapo_add_hookspecs"):
            plugin.slapo_add_hookspecs(self.manager)

    def _register(self, record: PluginRecord) -> None:
        for name in self._hook_names():
            method = getattr(record.plugin, name, None)
            if method is not None and inspect.isroutine(method) and not self._is_hook_implementation(record.plugin, name):
                raise PluginError(f"{name} is not marked with @hookimpl", owner=str(record))
        self.manager.register(record.plugin, record.name)

    def _is_hook_implementation(self, plugin: object, name: str) -> bool:
        return hasattr(plugin, name) and self.manager.parse_hookimpl_opts(plugin, name) is not None

    def _hook_names(self) -> list[str]:
        return [name for name, caller in vars(self.manager.hook).items() if caller.has_spec()]

    def _refuse_unknown_hooks(self, record: PluginRecord) -> None:
        """Refuse an implementation of a hook without specification, such as a misspelt one; pluggy accepts it."""
        for name, caller in vars(self.manager.hook).items():
            own = [impl for impl in caller.get_hookimpls() if impl.plugin is record.plugin and not impl.optionalhook]
            if own and not caller.has_spec():
                raise UnknownNameError.of("hook", name, self._hook_names())
