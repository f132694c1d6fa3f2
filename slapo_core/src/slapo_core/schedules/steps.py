"""The state that all handles of a schedule share, and the path that every primitive call takes.

Order: look-up, ``slapo_before_apply``, contracts, snapshot, check, apply, ``slapo_after_apply``, journal. Any error restores
the snapshot and is raised again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, update_wrapper
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..interfaces.primitive import Primitive, call_signature, takes_checked
from ..modules.holders import Holders
from ..registration.registry import Registry
from ..reporting.errors import ScheduleError, UnknownNameError
from .journal import Journal, Step
from .transaction import Snapshot, Transaction

if TYPE_CHECKING:
    from ..interfaces.program import Program
    from .schedule import Schedule


@dataclass
class ScheduleMetadata:
    """Metadata of one module.

    Args:
        tie_weights: Top module only: the tied parameters.
        param_tags: Names of parameter attributes that carry over to a tensor that replaces the parameter; ``annotate`` adds to
            them.
        primitives: Name of each primitive applied to this module, to the state that it keeps there. ``"cut_pipeline_stage"`` of
            the top module has the paths of all cuts, in order.
        partition_idx: Pipeline stage of the module, if assigned.

    Example:
        >>> sch = create_schedule(nn.Linear(2, 2)).annotate("weight", "lr_scale", 0.1)
        >>> sch.metadata.param_tags, sch.metadata.primitives
        ({'lr_scale'}, {'annotate': None})
    """

    tie_weights: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    param_tags: set[str] = field(default_factory=set)
    primitives: dict[str, Any] = field(default_factory=dict)
    partition_idx: int | None = None


@dataclass(eq=False)
class Root:
    """State that all handles of one schedule share."""

    module: nn.Module
    model: str  # class name of the unmodified model
    name: str
    registry: Registry
    group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    example_inputs: Any
    journal: Journal = field(default_factory=Journal)
    holders: Holders = field(default_factory=Holders)
    metadata: WeakKeyDictionary[nn.Module, ScheduleMetadata] = field(default_factory=WeakKeyDictionary)
    transaction: Transaction | None = None
    children: list[Step] = field(default_factory=list)  # steps that the current step took
    program: Program | None = None  # result of the last build
    target: str | None = None  # dialect of the engine that was built from the model
    handles: WeakValueDictionary[str, Schedule] = field(default_factory=WeakValueDictionary)  # one per path in use

    @cached_property
    def mesh_group(self) -> dist.ProcessGroup | None:
        """The process group of the mesh's ``tp`` axis; None if it has none."""
        return self.mesh.get_group("tp") if self.mesh is not None and "tp" in (self.mesh.mesh_dim_names or ()) else None

    def metadata_of(self, module: nn.Module) -> ScheduleMetadata:
        """Return the metadata of one module, created on demand."""
        return self.metadata.get(module) or self.metadata.setdefault(module, ScheduleMetadata())

    def __deepcopy__(self, memo: dict[int, Any]) -> Root:
        """Return a copy of the model with the metadata of its modules and parameters. Its steps cannot be undone."""
        module, journal = copy.deepcopy(self.module, memo), self.journal.sealed_copy()
        copied = Root(module, self.model, self.name, self.registry, self.group, self.mesh, self.example_inputs, journal)
        for known, metadata in self.metadata.items():
            if id(known) in memo:
                copied.metadata[memo[id(known)]] = copy.deepcopy(metadata, memo)
        return copied


def take_step(schedule: Schedule, root: Root, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a primitive in a transaction. Steps that it takes itself become its children."""
    cls = root.registry.primitive(name)
    if root.target is not None:
        built = f"the schedule was built for {root.target!r}, whose engine would not see the step; start a new schedule"
        raise ScheduleError(built, path=schedule.path, primitive=name)
    module = schedule.mod
    root.registry.notify("slapo_before_apply", schedule=schedule, name=name, args=args, kwargs=kwargs)
    _check_call(cls, schedule, name, args, kwargs)
    _check_contracts(cls, schedule, name)

    transaction = Transaction()
    metadata = root.metadata_of(module)
    transaction.on_undo(_MetadataSnapshot(root.holders, metadata))
    (transaction.touch if cls.scope == "module" else transaction.touch_tree)(module)
    outer, siblings, kept = root.transaction, root.children, root.holders.is_reusable
    root.transaction, root.children = transaction, []
    try:
        checked = cls.check(schedule, *args, **kwargs)  # rolled back too, should a plugin's check change something
        root.holders.is_reusable = kept and cls.scope == "module"
        metadata.primitives.setdefault(name, cls.init_metadata())
        value = cls.apply(schedule, *args, **kwargs, **({"checked": checked} if takes_checked(cls) else {}))
        if transaction.wrote_in_place():
            # the rollback then raises the full message
            raise ScheduleError("writes into a parameter in place", path=schedule.path, primitive=name)
        if cls.scope != "module":
            root.holders.invalidate()
        step = Step(schedule.path, name, args, kwargs, root.registry.provider("primitive", name), tuple(root.children))
        root.registry.notify("slapo_after_apply", schedule=schedule, step=step)
    except BaseException:
        transaction.rollback()
        raise
    finally:
        root.transaction, root.children, root.holders.is_reusable = outer, siblings, kept
    if outer is None:
        root.journal.record(step, transaction)
    else:
        outer.absorb(transaction)
        siblings.append(step)
    return schedule if value is None else value


@contextmanager
def savepoint(schedule: Schedule) -> Iterator[None]:
    """Roll back the steps and changes of a ``with`` block that raises, so that a primitive's ``apply`` can go on otherwise.

    Args:
        schedule: The schedule that the primitive is applied to.

    Example:
        >>> @register_primitive()
        ... class TryTanhPrimitive(Primitive):
        ...     name = "try_tanh"
        ...
        ...     @staticmethod
        ...     def apply(schedule):
        ...         try:
        ...             with savepoint(schedule):
        ...                 schedule["0"].replace(nn.Tanh())
        ...                 schedule["0"].replace("no module")
        ...         except ScheduleError as error:
        ...             print(error)
        >>> create_schedule(nn.Sequential(nn.ReLU())).try_tanh()["0"].mod
        replace('0'): 'no module' is not a module; give an nn.Module
        ReLU()
    """
    root = schedule._root
    outer, children = root.transaction, len(root.children)
    root.transaction = inner = Transaction()
    try:
        yield
    except BaseException:
        del root.children[children:]
        inner.rollback()
        raise
    finally:
        root.transaction = outer
    if outer is not None:
        outer.absorb(inner)


@lru_cache(maxsize=1024)
def _bind(cls: type[Primitive], positional: int, names: tuple[str, ...]) -> None:
    """Raise ``TypeError`` if a call does not fit the signature, judged by its number of positional arguments and its
    keywords.
    """
    call_signature(cls).bind(None, *range(positional), **dict.fromkeys(names))
    if "checked" in names and takes_checked(cls):  # bind accepted it, since apply has **kwargs
        raise TypeError("'checked' is the result of the check, no argument")


def _check_call(cls: type[Primitive], schedule: Schedule, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        _bind(cls, len(args), tuple(kwargs))
    except TypeError as err:
        known = ", ".join(map(str, list(call_signature(cls).parameters.values())[1:]))
        raise ScheduleError(f"{err}; it takes ({known})", path=schedule.path, primitive=name) from err


def _check_contracts(cls: type[Primitive], schedule: Schedule, name: str) -> None:
    if missing := [other for other in cls.requires if other not in schedule.metadata.primitives]:
        raise ScheduleError(f"needs {missing[0]!r} on this module first", path=schedule.path, primitive=name)
    for other in cls.conflicts:
        if (at := _find_primitive(schedule, other)) is not None:
            where = "this module" if at == schedule.path else repr(at)
            raise ScheduleError(f"cannot follow {other!r} on {where}; undo one of them", path=schedule.path, primitive=name)


def _find_primitive(schedule: Schedule, name: str) -> str | None:
    """Return the path of a module at, above or below the schedule's to which ``name`` was applied, or None."""
    above = schedule.parent
    while above is not None:
        if name in above.metadata.primitives:
            return above.path
        above = above.parent
    return next((handle.path for _, handle in schedule.named_schedules() if name in handle.metadata.primitives), None)


class _MetadataSnapshot(Snapshot):
    """Snapshot of a module's metadata, restored last when a step is undone.

    One object per step, since the garbage collector scans the undo actions of all steps.
    """

    def __init__(self, holders: Holders, metadata: ScheduleMetadata) -> None:
        super().__init__(metadata)
        self.holders, self.tags = holders, set(metadata.param_tags)
        self.primitives = {name: copy.copy(value) for name, value in metadata.primitives.items()}

    def drop_unchanged(self) -> bool:
        """Tags that are added from now on stay."""
        self.is_reduced, self.tags = True, self.tags ^ self.subject.param_tags
        return True

    def restore(self) -> None:
        self.holders.invalidate()
        self.subject.primitives.clear()
        self.subject.primitives.update(self.primitives)
        self.subject.param_tags ^= self.tags


class UnknownPrimitiveError(UnknownNameError, AttributeError):
    """Error of ``sch.<name>`` if no such primitive or attribute exists; an ``AttributeError``, so that ``hasattr`` works."""


def schedule_method(registry: Registry, name: str) -> Callable[..., Any]:
    """Return the function of a schedule that runs a query or applies a primitive, with its docstring and the users'
    signature.
    """
    if registry.has("query", name):
        return _method(name, registry.get("query", name))
    try:
        return _method(name, registry.primitive(name))
    except UnknownNameError as err:
        raise UnknownPrimitiveError(str(err)) from err


@lru_cache(maxsize=1024)
def _method(name: str, provided: Any) -> Callable[..., Any]:
    if isinstance(provided, type) and issubclass(provided, Primitive):
        shown, signature = provided.apply, call_signature(provided)
        call: Any = lambda schedule, /, *args, **kwargs: schedule.apply(name, *args, **kwargs)  # noqa: E731
    else:
        shown, signature = provided, inspect.signature(provided)
        call = lambda schedule, /, *args, **kwargs: provided(schedule, *args, **kwargs)  # noqa: E731
    call.__name__, call.__doc__ = name, provided.__doc__
    first, *others = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=[first.replace(name="self"), *others])
    return update_wrapper(call, shown, (), ())
