"""Names to primitives, dialects and models, and who provides them."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar, cast, overload

import pluggy

from ..interfaces.codec import Codec
from ..interfaces.primitive import Primitive
from ..interfaces.renderable import Renderable
from ..reporting.errors import PluginError, UnknownNameError
from ..reporting.failure_reason import failure_reason
from .entries import CALLED_ON_SCHEDULES, HOMES, HOOKS, Entry, class_name, entries_from
from .plugins import PluginRecord, Plugins

PrimitiveClass = TypeVar("PrimitiveClass", bound=type[Primitive])


class Registry:
    """Everything the plugins provide, by name.

    Args:
        plugins: Plugin objects to use with core instead of the installed plugins.
    """

    KINDS: ClassVar[Mapping[str, str]] = HOOKS
    """Kind of name to the hook that registers it."""

    def __init__(self, plugins: Iterable[object] | None = None) -> None:
        self._plugins = Plugins(plugins)
        self._entries: dict[tuple[str, str], list[Entry]] = {}
        self._loaded: dict[tuple[str, str], Any] = {}
        self._collect()
        for (kind, name), entries in self._entries.items():
            rivals = [
                entry
                for of in CALLED_ON_SCHEDULES
                if kind in CALLED_ON_SCHEDULES
                for entry in self._entries.get((of, name), ())
            ]
            if len(rivals or entries) > 1:
                self._note(entries, Entry.conflict(rivals or entries))

    @property
    def hook(self) -> pluggy.HookRelay:
        """Calls the hooks of all loaded plugins."""
        return self._plugins.manager.hook

    @property
    def records(self) -> list[PluginRecord]:
        """All plugins found, sorted by name, also those that are disabled or did not load."""
        return self._plugins.records

    def entries(self, kind: str) -> list[Entry]:
        """The usable entries of a kind, sorted by name; imports nothing."""
        found = [entries[0] for (of, _), entries in self._entries.items() if of == kind and len(entries) == 1]
        return sorted(found, key=lambda entry: entry.name)

    def get(self, kind: str, name: str) -> Any:
        """The class or function behind a name, imported when first asked for.

        Raises:
            UnknownNameError: no plugin provides the name.
            PluginError: it cannot be imported, is not what it should be, or two plugins provide it.
        """
        found = self._loaded.get((kind, name))
        if found is None:
            found = self._loaded[kind, name] = self._entry(kind, name).load()
        return found

    def importable(self, kind: str) -> dict[str, Any]:
        """All of a kind that can be imported, by name; one that cannot is noted among its plugin's problems."""
        found = {}
        for entry in self.entries(kind):
            try:
                found[entry.name] = self.get(kind, entry.name)
            except PluginError as error:
                self._note([entry], error)
        return found

    def provider(self, kind: str, name: str) -> str:
        """Distribution and version that provide a name, e.g. ``"slapo-core 0.1.0"``."""
        return self._entry(kind, name).provider

    def primitive(self, name: str) -> type[Primitive]:
        """The primitive users call ``name``."""
        return cast("type[Primitive]", self.get("primitive", name))

    def has(self, kind: str, name: str) -> bool:
        """Return whether a plugin provides the name; imports nothing."""
        return (kind, name) in self._entries

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind, sorted; imports nothing."""
        return [entry.name for entry in self.entries(kind)]

    @cached_property
    def codecs(self) -> tuple[type[Codec], ...]:
        """The codecs of arguments in saved schedules."""
        return tuple(self.importable("codec").values())

    def add_primitive(self, primitive: type[Primitive]) -> None:
        """Register a class in this process; defining it once more, as notebooks do, replaces it."""
        entry = Entry("primitive", class_name(primitive), primitive)
        entry.check(_RESERVED)
        for other in self._entries.get((entry.kind, entry.name), ()):
            if other.record or _import_path(other.target) != _import_path(primitive):
                raise Entry.conflict([other, entry])
        self._entries[entry.kind, entry.name] = [entry]
        self._loaded[entry.kind, entry.name] = primitive

    def provided(self, hook: str, kind: str) -> dict[str, list[Entry]]:
        """Return what plugins give for a registration hook of another plugin: each name with the entries that provide it.

        Args:
            hook: Name of the hook; each plugin returns a mapping from names to targets.
            kind: What errors call one of them, e.g. ``"compiler"``.

        Raises:
            PluginError: a plugin's hook fails, or returns something else.
        """
        found: dict[str, list[Entry]] = {}
        records = {id(record.plugin): record for record in self.records}
        for implementation in getattr(self.hook, hook).get_hookimpls():
            record = records[id(implementation.plugin)]
            try:
                given = implementation.function()
            except (Exception, SystemExit) as error:
                raise PluginError(f"{hook} of {record} failed: {failure_reason(error)}", owner=str(record)) from error
            if not isinstance(given, Mapping):
                raise PluginError(f"{hook} of {record} returned {given!r}; return {{name: {kind}}}", owner=str(record))
            for name, target in given.items():
                found.setdefault(name, []).append(Entry(kind, name, target, record))
        return found

    def hooks_of(self, record: PluginRecord) -> list[str]:
        """The names of the hooks a plugin implements, sorted."""
        callers = self._plugins.manager.get_hookcallers(record.plugin) if record.loaded else None
        return sorted(caller.name for caller in callers or ())

    def notify(self, hook: str, **arguments: object) -> None:
        """Call an event hook; where no plugin implements it this costs next to nothing."""
        if (caller := getattr(self.hook, hook)).get_hookimpls():
            caller(**arguments)

    def call_each(self, hook: str, **arguments: object) -> None:
        """Call an event hook one plugin at a time; what one raises is noted among its problems and the others go on."""
        for impl in reversed(getattr(self.hook, hook).get_hookimpls()):
            try:
                impl.function(*(arguments[name] for name in impl.argnames))
            except (Exception, SystemExit) as error:
                record, problem = self._plugins.failed(hook, impl.plugin, error)
                if self._plugins.strict:
                    raise problem from error
                record.problems.append(str(problem))

    def _collect(self) -> None:
        """Call the registration hooks one plugin at a time, so that one that raises takes nothing else with it."""
        calls: dict[int, list[tuple[str, Callable[[], object]]]] = defaultdict(list)
        for kind, hook in HOOKS.items():
            for impl in getattr(self.hook, hook).get_hookimpls():
                calls[id(impl.plugin)].append((kind, impl.function))
        for record in [record for record in self.records if record.loaded]:
            with self._plugins.guard(record):
                entries = [entry for kind, call in calls[id(record.plugin)] for entry in entries_from(kind, call(), record)]
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

    def _note(self, entries: Iterable[Entry], error: PluginError) -> None:
        if self._plugins.strict:
            raise error
        for entry in entries:
            if entry.record and str(error) not in entry.record.problems:
                entry.record.problems.append(str(error))


def _import_path(target: type) -> str:
    return f"{target.__module__}.{target.__qualname__}"


_RESERVED: set[str] = set()
_Class = TypeVar("_Class", bound=type)


def reserve_names(cls: _Class) -> _Class:
    """Class decorator: no primitive or query may have the name of a public attribute of this class."""
    _RESERVED.update(name for name in dir(cls) if not name.startswith("_"))
    return cls


class _Default:
    """The registry of this process, made when first asked for."""

    lock = threading.RLock()
    registry: Registry | None = None
    loading = False


def default_registry() -> Registry:
    """The registry of the installed plugins, loaded once per process."""
    with _Default.lock:
        if _Default.registry is None:
            if _Default.loading:
                raise PluginError("the registry is asked for while plugins are being imported; do that in a hook", owner="")
            _Default.loading = True
            try:
                with _no_collection():
                    _Default.registry = Registry()
            finally:
                _Default.loading = False
        return _Default.registry


Renderable._default_registry = staticmethod(default_registry)


@contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """Let ``registry`` be the default one of this process in the block."""
    before, _Default.registry = _Default.registry, registry
    try:
        yield registry
    finally:
        _Default.registry = before


@contextmanager
def _no_collection() -> Iterator[None]:
    """Loading makes many objects that all stay; a collection in the middle walks all of torch's and costs twice the loading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def register_primitive() -> Callable[[PrimitiveClass], PrimitiveClass]:
    """A class decorator that registers a primitive in this process, for notebooks and tests; plugins use the hook."""

    def register(primitive: PrimitiveClass) -> PrimitiveClass:
        default_registry().add_primitive(primitive)
        return primitive

    return register


@overload
def list_primitives(name_only: Literal[True] = True) -> list[str]: ...
@overload
def list_primitives(name_only: Literal[False]) -> dict[str, type[Primitive]]: ...
def list_primitives(name_only: bool = True) -> list[str] | dict[str, type[Primitive]]:
    """All installed primitives.

    Args:
        name_only: Give the sorted names alone, which imports no plugin's heavy code.

    Returns:
        The names, or names to classes.
    """
    registry = default_registry()
    return registry.names("primitive") if name_only else registry.importable("primitive")
