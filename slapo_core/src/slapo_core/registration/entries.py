"""Names that plugins provide: entries of the registry, and names of packages that are imported when first used."""

from __future__ import annotations

import inspect
import keyword
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..interfaces.codec import Codec
from ..interfaces.dialect import Dialect
from ..interfaces.primitive import Primitive
from ..reporting.errors import PluginError, failure_reason
from .plugins import PluginRecord

HOOKS = {
    "primitive": "slapo_primitives",
    "dialect": "slapo_dialects",
    "model": "slapo_models",
    "query": "slapo_queries",
    "codec": "slapo_codecs",
    "subgraph primitive": "slapo_subgraph_primitives",
}
"""Kind of name to the hook that registers it."""

METHOD_KINDS = ("primitive", "query")
"""Kinds whose names are called as ``sch.NAME(...)``. A name belongs to one kind only."""

_BASE_CLASSES: dict[str, type] = {"primitive": Primitive, "dialect": Dialect, "codec": Codec, "subgraph primitive": Primitive}

HOMES = {
    "slapo-deepspeed": ("deepspeed",),
    "slapo-fusion": ("compile", "decompose", "fuse"),
    "slapo-kernels": ("use_kernels",),
    "slapo-megatron": ("megatron",),
    "slapo-memory": ("checkpoint", "offload"),
    "slapo-pipeline": ("cut_at_marks", "cut_pipeline_stage", "pipeline"),
    "slapo-sharding": ("fork_rng", "shard", "sync", "sync_batch_norm", "tensor_parallel"),
    "slapo-torch": ("torch",),
    "slapo-tracing": ("find", "find_node", "find_subgraph", "trace", "trace_until"),
    "slapo-training": ("full_state",),
}
"""Distribution to the primitives, queries and dialects that it provides, for the error if it is not installed."""


@dataclass(frozen=True)
class Entry:
    """One name that a plugin provides.

    Args:
        kind: A key of ``HOOKS``, e.g. ``"primitive"``.
        name: The name users write.
        target: The class or function, or its import path ``"module:name"``.
        record: The plugin; None for a class that ``register_primitive`` added in this process.

    Example:
        >>> entry = Entry("query", "prod", "math:prod")
        >>> entry.provider, entry.load()([2, 3])
        ('math', 6)
    """

    kind: str
    name: str
    target: Any
    record: PluginRecord | None = None

    @property
    def provider(self) -> str:
        """Distribution and version; the module if the class was registered in this process."""
        if self.record:
            return self.record.provider
        return self.target.partition(":")[0] if isinstance(self.target, str) else str(self.target.__module__)

    def load(self) -> Any:
        """Return the class or function, imported if needed.

        Raises:
            PluginError: it cannot be imported, or does not fit its kind.
        """
        try:
            target = pkgutil.resolve_name(self.target) if isinstance(self.target, str) else self.target
        except (Exception, SystemExit) as error:
            raise self._error(failure_reason(error)) from error
        if problem := self._problem(target):
            raise self._error(problem)
        return target

    def check(self, reserved: Iterable[str]) -> None:
        """Refuse an entry whose name or target is invalid. Imports nothing.

        Args:
            reserved: Attributes of ``Schedule``, which a primitive or query of the same name would hide.

        Raises:
            PluginError: the name or the target is invalid.
        """
        if not isinstance(self.name, str) or not self.name:
            raise self._error("its name is not a word")
        if self.kind in METHOD_KINDS:
            if not self.name.isidentifier() or keyword.iskeyword(self.name) or self.name.startswith("_"):
                raise self._error("its name cannot be called as sch.<name>(...)")
            if self.name in reserved:
                raise self._error("Schedule has an attribute of this name")
        if not isinstance(self.target, str):
            self.load()
        elif self.target.count(":") != 1 or not all(part.isidentifier() for part in self.target.replace(":", ".").split(".")):
            raise self._error(f"{self.target!r} is not of the form 'module:Class'")

    @staticmethod
    def conflict(entries: Sequence[Entry]) -> PluginError:
        """Return the error for a name that several plugins provide."""
        owners = " and ".join(sorted(entry.provider for entry in entries))
        problem = f"{entries[0].kind} {entries[0].name!r} is provided by {owners}"
        return PluginError(f"{problem}; uninstall one or disable it with SLAPO_DISABLE_PLUGINS", owner=owners)

    def _problem(self, target: Any) -> str | None:
        base = _BASE_CLASSES.get(self.kind)
        if base is None:
            return None if callable(target) else f"{target!r} is not a function"
        if not (isinstance(target, type) and issubclass(target, base)):
            return f"{target!r} is not a subclass of {base.__name__}"
        if inspect.isabstract(target):
            return f"{target.__name__} does not define {', '.join(sorted(getattr(target, '__abstractmethods__', ())))}"
        if class_name(target) != self.name:
            return f"{target.__name__} says its name is {class_name(target)!r}"
        return None

    def _error(self, problem: str) -> PluginError:
        return PluginError(f"{self.kind} {self.name!r} of {self.provider} cannot be used: {problem}", owner=self.provider)


def entries_from(kind: str, provided: object, record: PluginRecord, hook: str) -> list[Entry]:
    """Return the entries in the result of a registration hook.

    Raises:
        PluginError: the result is not a mapping.
    """
    if not isinstance(provided, Mapping):
        raise PluginError(f"{hook} of {record} returned {provided!r}; return {{name: {kind}}}", owner=str(record))
    return [Entry(kind, name, target, record) for name, target in provided.items()]


def class_name(target: type) -> str:
    """Return the ``name`` of a primitive or dialect class: an attribute, or the classic static method."""
    name = getattr(target, "name", "")
    return str(name() if callable(name) else name)


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that imports its public names when they are first used (PEP 562).

    Loading a plugin imports its package, and listing primitives loads all plugins. A package that imports nothing keeps that
    cheap. Under ``TYPE_CHECKING`` the same names are imported as usual, for type checkers.

    Args:
        package: ``__name__`` of the package.
        modules: Names by the submodule that defines them, relative to the package.

    Example:
        In the ``__init__.py`` of a plugin::

            if TYPE_CHECKING:
                from .rotary import rotate, rotate_back
            else:
                __getattr__ = lazy_names(__name__, {"rotary": ["rotate", "rotate_back"]})

        >>> lazy_names("torch.nn", {"functional": ["gelu"]})("gelu") is nn.functional.gelu
        True
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        return pkgutil.resolve_name(f"{package}.{homes[name]}:{name}")

    return get_attribute
