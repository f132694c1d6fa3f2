"""Registry of the names that plugins provide: primitives, dialects, models, queries and codecs."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeVar, cast, overload

import pluggy

from .. import hookspecs
from ..interfaces.codec import Codec
from ..interfaces.primitive import Primitive
from ..interfaces.program import Renderable
from ..reporting.errors import PluginError, UnknownNameError
from .entries import HOMES, HOOKS, METHOD_KINDS, Entry, class_name, entries_from
from .plugins import PluginRecord, Plugins

PrimitiveClass = TypeVar("PrimitiveClass", bound=type[Primitive])


class Registry:
    """Classes and functions that the plugins provide, by kind and name.

    Args:
        plugins: Plugin objects to use with core instead of the installed plugins.

    Example:
        >>> class CountPlugin:
        ...     @hookimpl
        ...     def slapo_queries(self):
        ...         return {"count_modules": lambda schedule: len(list(schedule.mod.modules()))}
        >>> registry = Registry([CountPlugin()])
        >>> create_schedule(nn.Sequential(nn.ReLU()), plugins=registry).count_modules()
        2
        >>> registry.primitive("resplace")
        Traceback (most recent call last):
        slapo_core.reporting.errors.UnknownNameError: no primitive 'resplace'; did you mean 'replace'?; available: annotate,
            replace, replace_all
    """

    KINDS: ClassVar[Mapping[str, str]] = HOOKS
    """Kind of name to the hook that registers it."""

    def __init__(self, plugins: Iterable[object] | None = None) -> None:
        self._plugins = Plugins(hookspecs, plugins)
        self._entries: dict[tuple[str, str], list[Entry]] = {}
        self._loaded: dict[tuple[str, str], Any] = {}
        self._collect()
        for (kind, name), entries in self._entries.items():
            rivals = [entry for of in METHOD_KINDS if kind in METHOD_KINDS for entry in self._entries.get((of, name), ())]
            if len(rivals or entries) > 1:
                self._add_problem(entries, Entry.conflict(rivals or entries))

    @property
    def hook(self) -> pluggy.HookRelay:
        """Caller of the hooks of all loaded plugins."""
        return self._plugins.manager.hook

    @property
    def records(self) -> list[PluginRecord]:
        """All plugins found, sorted by name, including those that are disabled or failed to load."""
        return self._plugins.records

    def entries(self, kind: str) -> list[Entry]:
        """Return the usable entries of a kind, sorted by name. Imports nothing."""
        found = [entries[0] for (of, _), entries in self._entries.items() if of == kind and len(entries) == 1]
        return sorted(found, key=lambda entry: entry.name)

    def get(self, kind: str, name: str) -> Any:
        """Return the class or function of a name, imported at its first use.

        Raises:
            UnknownNameError: no plugin provides the name.
            PluginError: it cannot be imported, does not fit its kind, or two plugins provide it.
        """
        if (kind, name) not in self._loaded:
            self._loaded[kind, name] = self._entry(kind, name).load()
        return self._loaded[kind, name]

    def load_all(self, kind: str) -> dict[str, Any]:
        """Return the classes or functions of a kind by name. One that cannot be imported is recorded as a problem of its
        plugin.
        """
        found = {}
        for entry in self.entries(kind):
            try:
                found[entry.name] = self.get(kind, entry.name)
            except PluginError as error:
                self._add_problem([entry], error)
        return found

    def provider(self, kind: str, name: str) -> str:
        """Return the distribution and version that provide a name, e.g. ``"slapo-core 0.1.0"``."""
        return self._entry(kind, name).provider

    def primitive(self, name: str) -> type[Primitive]:
        """Return the primitive of this name."""
        return cast("type[Primitive]", self.get("primitive", name))

    def has(self, kind: str, name: str) -> bool:
        """Return True if a plugin provides the name. Imports nothing."""
        return (kind, name) in self._entries

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind, sorted; imports nothing."""
        return [entry.name for entry in self.entries(kind)]

    @cached_property
    def codecs(self) -> tuple[type[Codec], ...]:
        """The codecs for arguments in saved schedules."""
        return tuple(self.load_all("codec").values())

    def add_primitive(self, primitive: PrimitiveClass) -> PrimitiveClass:
        """Register a class in this process, and return it. A second definition replaces the first, as happens in notebooks.

        Raises:
            PluginError: another class provides the name, or the name is reserved.
        """
        entry = Entry("primitive", class_name(primitive), primitive)
        entry.check(_RESERVED)
        for other in [other for kind in METHOD_KINDS for other in self._entries.get((kind, entry.name), ())]:
            # compared by name: a notebook defines the class anew
            if other.record or _qualified_name(other.target) != _qualified_name(primitive):
                raise Entry.conflict([other, entry])
        self._entries[entry.kind, entry.name] = [entry]
        self._loaded[entry.kind, entry.name] = primitive
        return primitive

    def entries_of_hook(self, hook: str, kind: str) -> dict[str, list[Entry]]:
        """Return the entries that plugins provide through a registration hook that another plugin specifies, by name.

        Args:
            hook: Name of the hook, which returns a mapping from names to targets.
            kind: Word for one entry in error messages, e.g. ``"compiler"``.

        Raises:
            PluginError: the hook of a plugin fails, or does not return a mapping.
        """
        found: dict[str, list[Entry]] = defaultdict(list)
        records = {id(record.plugin): record for record in self.records}
        for implementation in getattr(self.hook, hook).get_hookimpls():
            try:
                given = implementation.function()
            except (Exception, SystemExit) as error:
                raise self._plugins.hook_error(hook, implementation.plugin, error)[1] from error
            for entry in entries_from(kind, given, records[id(implementation.plugin)], hook):
                found[entry.name].append(entry)
        return dict(found)

    def hooks_of(self, record: PluginRecord) -> list[str]:
        """Return the names of the hooks that a plugin implements, sorted."""
        callers = record.loaded and self._plugins.manager.get_hookcallers(record.plugin)
        return sorted(caller.name for caller in callers or ())

    def notify(self, hook: str, **arguments: object) -> None:
        """Call an event hook. Almost free if no plugin implements it."""
        if (caller := getattr(self.hook, hook)).get_hookimpls():
            caller(**arguments)

    def call_each(self, hook: str, **arguments: object) -> None:
        """Call an event hook plugin by plugin. An error is recorded as a problem of its plugin, and the others are still
        called.
        """
        for impl in reversed(getattr(self.hook, hook).get_hookimpls()):
            try:
                impl.function(*(arguments[name] for name in impl.argnames))
            except (Exception, SystemExit) as error:
                record, problem = self._plugins.hook_error(hook, impl.plugin, error)
                if self._plugins.strict:
                    raise problem from error
                record.problems.append(str(problem))

    def _collect(self) -> None:
        """Call the registration hooks plugin by plugin, so that the failure of one leaves the others usable."""
        calls: dict[int, list[tuple[str, Callable[[], object]]]] = defaultdict(list)
        for kind, hook in HOOKS.items():
            for impl in getattr(self.hook, hook).get_hookimpls():
                calls[id(impl.plugin)].append((kind, impl.function))
        for record in [record for record in self.records if record.loaded]:
            with self._plugins.guard(record):
                given = [entries_from(kind, call(), record, HOOKS[kind]) for kind, call in calls[id(record.plugin)]]
                entries = [entry for each in given for entry in each]
                for entry in entries:
                    entry.check(_RESERVED)
                for entry in entries:
                    self._entries.setdefault((entry.kind, entry.name), []).append(entry)

    def _entry(self, kind: str, name: str) -> Entry:
        entries = self._entries.get((kind, name), [])
        if not entries:
            failures = [failure for record in self.records if (failure := record.failure)]
            absent = HOMES.keys() - {f"slapo-{record.name}" for record in self.records}
            missing = [f"{name!r} comes with {home}; pip install {home}" for home in absent if name in HOMES[home]]
            raise UnknownNameError.of(kind, name, self.names(kind), [*failures, *missing])
        if len(entries) > 1:
            raise Entry.conflict(entries)
        return entries[0]

    def _add_problem(self, entries: Iterable[Entry], error: PluginError) -> None:
        if self._plugins.strict:
            raise error
        for entry in entries:
            if entry.record and str(error) not in entry.record.problems:
                entry.record.problems.append(str(error))


_qualified_name = attrgetter("__module__", "__qualname__")
_RESERVED: set[str] = set()
_Class = TypeVar("_Class", bound=type)


def reserve_names(cls: _Class) -> _Class:
    """Class decorator: refuse primitives and queries with the name of a public attribute of this class."""
    _RESERVED.update(name for name in dir(cls) if not name.startswith("_"))
    return cls


class _DefaultRegistry:
    """The registry of this process, made on demand."""

    lock = threading.RLock()
    registry: Registry | None = None
    loading = False


def default_registry() -> Registry:
    """Return the registry of the installed plugins, loaded once per process.

    Raises:
        PluginError: called while the plugins are being imported.

    Example:
        >>> default_registry().has("primitive", "replace")
        True
    """
    with _DefaultRegistry.lock:
        if _DefaultRegistry.registry is None:
            if _DefaultRegistry.loading:
                raise PluginError("the registry is used while plugins are being imported; use it in a hook", owner="")
            # Loading creates many objects that all stay; a collection meanwhile scans all of torch's and doubles the time.
            _DefaultRegistry.loading, is_collecting = True, gc.isenabled()
            gc.disable()
            try:
                _DefaultRegistry.registry = Registry()
            finally:
                _DefaultRegistry.loading = False
                if is_collecting:
                    gc.enable()
        return _DefaultRegistry.registry


Renderable._default_registry = staticmethod(default_registry)


@contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """Make ``registry`` the default registry of this process in a ``with`` block.

    Example:
        >>> with use_registry(Registry([])):
        ...     list_primitives()
        ['annotate', 'replace', 'replace_all']
    """
    before, _DefaultRegistry.registry = _DefaultRegistry.registry, registry
    try:
        yield registry
    finally:
        _DefaultRegistry.registry = before


def register_primitive() -> Callable[[PrimitiveClass], PrimitiveClass]:
    """Return a class decorator that registers a primitive in this process, for notebooks and tests. Plugins use the hook.

    Example:
        >>> @register_primitive()
        ... class NoOpPrimitive(Primitive):
        ...     name = "no_op"
        ...
        ...     @staticmethod
        ...     def apply(schedule):
        ...         pass
        >>> create_schedule(nn.ReLU()).no_op()
        Schedule('': ReLU)
    """
    return default_registry().add_primitive


@overload
def list_primitives(name_only: Literal[True] = True) -> list[str]: ...
@overload
def list_primitives(name_only: Literal[False]) -> dict[str, type[Primitive]]: ...
def list_primitives(name_only: bool = True) -> list[str] | dict[str, type[Primitive]]:
    """Return all installed primitives.

    Args:
        name_only: Return only the names, which imports no plugin's heavy code.

    Returns:
        The names, sorted, or a dict from names to classes.

    Example:
        >>> "replace" in list_primitives()
        True
        >>> list_primitives(name_only=False)["annotate"].__name__
        'AnnotatePrimitive'
    """
    registry = default_registry()
    return registry.names("primitive") if name_only else registry.load_all("primitive")
