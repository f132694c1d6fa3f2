"""The schedule: a cursor into the live module tree.

The module tree is the single source of truth. A ``Schedule`` is a shared ``Root`` and a dotted path, so nothing has to be
kept in step after a rewrite, and a handle taken before one still works, or says that its module is gone.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..interfaces.renderable import Renderable
from ..modules import paths
from ..modules.holders import Holders, Place
from ..modules.parameters import name_parameters, parameter_facts
from ..registration.registry import Registry, default_registry, reserve_names
from ..reporting.errors import ScheduleError, UnknownNameError
from .journal import Journal, Step
from .steps import take_step
from .transaction import Transaction

if TYPE_CHECKING:
    from ..interfaces.program import Program


class UnknownPrimitiveError(UnknownNameError, AttributeError):
    """``sch.<name>`` where no such primitive or attribute exists; an ``AttributeError``, so that ``hasattr`` works."""


@dataclass
class ScheduleMetadata:
    """Metadata of one module.

    Args:
        tie_weights: Top module only: each parameter held at several places.
        param_tags: Names of attributes, of ``annotate`` or added here, that go on to what takes a parameter's place.
        primitives: Primitive name to the state it keeps for this module; a key means "was applied here". Of the top module
            ``"cut_pipeline_stage"`` has the paths of all cuts, in order.
        partition_idx: Pipeline stage of the module, where one was noted.
    """

    tie_weights: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    param_tags: set[str] = field(default_factory=set)
    primitives: dict[str, Any] = field(default_factory=dict)
    partition_idx: int | None = None


@dataclass(eq=False)
class Root:
    """State that all handles of one schedule share."""

    module: nn.Module
    model: str  # class of the unmodified model
    name: str
    registry: Registry
    group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    example_inputs: Any
    journal: Journal = field(default_factory=Journal)
    holders: Holders = field(default_factory=Holders)
    metadata: WeakKeyDictionary[nn.Module, ScheduleMetadata] = field(default_factory=WeakKeyDictionary)
    transaction: Transaction | None = None
    children: list[Step] = field(default_factory=list)  # steps taken inside the step under way
    checked: Any = None  # what the check of the step under way returned
    program: Program | None = None  # of the last build
    target: str | None = None  # the dialect that has built an engine from the model
    handles: WeakValueDictionary[str, Schedule] = field(default_factory=WeakValueDictionary)  # one for each path in use

    @cached_property
    def mesh_group(self) -> dist.ProcessGroup | None:
        """The process group of the mesh's ``tp`` axis, if it has one."""
        return self.mesh.get_group("tp") if self.mesh is not None and "tp" in (self.mesh.mesh_dim_names or ()) else None

    def metadata_of(self, module: nn.Module) -> ScheduleMetadata:
        """The metadata of one module, made when first asked for."""
        return self.metadata.get(module) or self.metadata.setdefault(module, ScheduleMetadata())

    def __deepcopy__(self, memo: dict[int, Any]) -> Root:
        """A copy of the model with all that is known of its modules and parameters; its past cannot be undone."""
        module, journal = copy.deepcopy(self.module, memo), self.journal.sealed_copy()
        copied = Root(module, self.model, self.name, self.registry, self.group, self.mesh, self.example_inputs, journal)
        for known, metadata in self.metadata.items():
            if id(known) in memo:
                copied.metadata[memo[id(known)]] = copy.deepcopy(metadata, memo)
        return copied


def _method(registry: Registry, name: str) -> Callable[..., Any]:
    """Return the function of a schedule that runs a query or applies a primitive, with what help() and signature() show."""
    if registry.has("query", name):
        shown = registry.get("query", name)
        call: Any = lambda schedule, /, *args, **kwargs: shown(schedule, *args, **kwargs)  # noqa: E731
        call.__doc__ = shown.__doc__
    else:
        try:
            primitive = registry.primitive(name)
        except UnknownNameError as err:
            raise UnknownPrimitiveError(str(err)) from err
        shown = primitive.apply
        call = lambda schedule, /, *args, **kwargs: schedule.apply(name, *args, **kwargs)  # noqa: E731
        call.__doc__ = primitive.__doc__
    call.__name__ = name
    signature = inspect.signature(shown)
    first, *others = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=[first.replace(name="self"), *others])
    return update_wrapper(call, shown, (), ())


class _ScheduleClass(type):
    """The class of ``Schedule``: ``help(Schedule.shard)`` shows what ``sch.shard`` does."""

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return _method(default_registry(), name)


@reserve_names
class Schedule(Renderable, metaclass=_ScheduleClass):
    """One module of a model, and the words to say how it is to run: ``sch["h.0.mlp"].checkpoint()``.

    Every installed primitive is a method; ``dir(sch)`` lists them. A call returns the schedule, or the primitive's own value.
    """

    __slots__ = ("__weakref__", "_path", "_root")
    _root: Root
    _path: str

    def __init__(
        self,
        mod: nn.Module,
        name: str = "",
        path: str = "",
        parent: Schedule | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        """Start a schedule; see ``create_schedule``, whose arguments these are."""
        made = create_schedule(mod, name, path, parent, group, **options)
        self._root, self._path = made._root, made._path
        self._root.handles[self._path] = self

    @classmethod
    def _of(cls, root: Root, path: str = "") -> Schedule:
        handle = root.handles.get(path)
        if handle is None:
            handle = root.handles[path] = object.__new__(cls)
            handle._root, handle._path = root, path
        return handle

    # ---- where it points

    @property
    def mod(self) -> nn.Module:
        """The module, looked up now.

        Raises:
            ScheduleError: an earlier step removed it.
        """
        found = paths.find(self._root.module, self._path)
        if found is None:
            raise ScheduleError(
                f"the module {self._path!r} is gone; a step since this handle was taken removed it", path=self._path
            )
        return found

    @property
    def name(self) -> str:
        """Last part of the path; the top schedule has the name given to ``create_schedule``."""
        return paths.split(self._path)[1] if self._path else self._root.name

    @property
    def path(self) -> str:
        """Dotted path from the top module; ``""`` is the top module itself."""
        return self._path

    @property
    def parent(self) -> Schedule | None:
        """The schedule of the module that holds this one; None at the top."""
        return Schedule._of(self._root, paths.split(self._path)[0]) if self._path else None

    @property
    def child(self) -> Mapping[str, Schedule]:
        """The schedules of the direct children, by name."""
        return {name: self._at(name) for name, module in self.mod._modules.items() if module is not None}

    @property
    def root_module(self) -> nn.Module:
        """The top module."""
        return self._root.module

    def get_top_schedule(self) -> Schedule:
        """The schedule of the top module."""
        return Schedule._of(self._root)

    # ---- where it runs

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh, axes out of ``pp``, ``dp``, ``tp``."""
        return self._root.mesh

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel process group: the one given, the mesh's ``tp`` axis, or the world; None in one process."""
        root = self._root
        if root.group is None and root.mesh is None:
            return dist.group.WORLD if dist.is_initialized() else None
        return root.mesh_group if root.group is None else root.group

    @property
    def rank(self) -> int:
        """This process's rank in ``group``; 0 without one."""
        group = self.group
        # torch has a number for a group that this process is not in
        return group.rank() if isinstance(group, dist.ProcessGroup) else 0 if group is None else -1

    @property
    def world_size(self) -> int:
        """Size of ``group``; 1 without one."""
        group = self.group
        return group.size() if isinstance(group, dist.ProcessGroup) else 1 if group is None else -1

    # ---- what is known

    @property
    def metadata(self) -> ScheduleMetadata:
        """Metadata of this module; a module put in by ``replace`` starts afresh."""
        return self._root.metadata_of(self.mod)

    @property
    def partition_idx(self) -> int | None:
        """The pipeline stage that ``slapo.pipeline.add_partition_notation`` noted here, or None."""
        return self.metadata.partition_idx

    @property
    def registry(self) -> Registry:
        """The plugins this schedule goes by."""
        return self._root.registry

    @property
    def journal(self) -> Journal:
        """Every step taken so far, of the whole model; ``print(sch.journal)`` shows it as Python."""
        return self._root.journal

    @property
    def program(self) -> Program | None:
        """The program of the last ``build``, or None before it."""
        return self._root.program

    @property
    def example_inputs(self) -> Any:
        """One batch of the top module's inputs as ``create_schedule`` was given it, or None."""
        return self._root.example_inputs

    @property
    def original_names(self) -> dict[str, tuple[str, ...]]:
        """Current name of every parameter below, from the top, to its names in the unmodified model.

        Several names for a tied parameter; none for one that a step brought in.
        """
        named = self.mod.named_parameters(prefix=self._path)
        return {name: parameter_facts(parameter).names for name, parameter in named}

    # ---- moving around

    def __getitem__(self, path: str) -> Schedule:
        """The schedule of the module at ``path`` below this one.

        Raises:
            UnknownNameError: no such module.
        """
        handle = self._at(paths.resolve_aliases(self.mod, path))
        if paths.find(self._root.module, handle._path) is None:
            near = [paths.join(self._path, name) for name in paths.nearby(self.mod, path)]
            raise UnknownNameError.of("module", handle._path, near)
        return handle

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and paths.find(self.mod, paths.resolve_aliases(self.mod, path)) is not None

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, Schedule]]:
        """Every schedule from this one down, itself first, with its path below this one (``prefix`` in front)."""
        for name, _ in list(self.mod.named_modules()):
            yield paths.join(prefix, name), self._at(name)

    def select(self, pattern: str) -> list[Schedule]:
        """The schedules whose path below this one matches a glob; ``*`` stays within one name, ``**`` crosses dots.

        Raises:
            ScheduleError: nothing matches.
        """
        found = dict(paths.select(self.mod, pattern))
        if not found:
            known = UnknownNameError.of("module", pattern, paths.nearby(self.mod, pattern))
            raise ScheduleError(f"{known}", path=self._path, primitive="select")
        return [self._at(name) for name in found]

    def _at(self, path: str) -> Schedule:
        return Schedule._of(self._root, paths.join(self._path, path))

    # ---- taking steps

    def apply(self, primitive: str, /, *args: Any, **kwargs: Any) -> Any:
        """Apply a primitive to this module: ``sch.apply("shard", "weight", axis=0)`` is ``sch.shard("weight", axis=0)``.

        Args:
            primitive: Name of an installed primitive.
            *args: For the primitive.
            **kwargs: For the primitive.

        Returns:
            This schedule, or the primitive's own value.

        Raises:
            UnknownNameError: no such primitive.
            ScheduleError: the step is illegal. Whatever is raised, the model is as it was before the call.
        """
        return take_step(self, self._root, primitive, args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return MethodType(_method(self._root.registry, name), self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._root.registry.names("primitive"), *self._root.registry.names("query")})

    def undo(self) -> Step:
        """Take the last step back, wherever in the model it was, and return it. ``build`` ends what can be undone."""
        self._root.holders.drop()
        return self._root.journal.undo()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the steps: ``*.json`` as data, ``*.py`` as code to edit; see ``load_schedule``.

        Raises:
            ScheduleError: a step has an argument that cannot be written down; names it. No file is written.
        """
        from .schedule_files import save_schedule  # noqa: PLC0415  replay imports this module

        save_schedule(self, path)

    # ---- for primitives

    def replace_module(self, new: nn.Module) -> None:
        """Put ``new`` in this module's place, at every place of the tree that holds the module."""
        root, old = self._root, self.mod
        if not self._path:
            self.on_undo(partial(setattr, root, "module", old))
            root.module = new
            root.holders.drop()
            return
        parent, name = paths.split(self._path)
        self._put(old, (root.module.get_submodule(parent), name), new)

    def set_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in the place of a parameter or buffer of this module, at every place a tie holds it.

        Args:
            name: Its name in this module, e.g. ``"weight"``.
            tensor: Usually made by ``slapo_core.modules.parameters.successor``, which carries the facts over.
        """
        mod = self.mod
        parameter = mod._parameters.get(name)
        old = parameter if parameter is not None else mod._buffers[name]
        assert old is not None
        self._put(old, (mod, name), tensor)

    def _put(self, old: nn.Module | torch.Tensor, known: Place, new: nn.Module | torch.Tensor) -> None:
        places = self.places_of(old, known)
        for holder, _ in places:
            self.touch(holder)
        self._root.holders.put(places, old, new)

    def places_of(self, value: nn.Module | torch.Tensor, known: Place | None = None) -> list[Place]:
        """Every ``(module, attribute name)`` of the model that holds this very module or tensor; several when tied or shared.

        Args:
            value: A module, parameter or buffer.
            known: One of the places, where the caller knows one.
        """
        return self._root.holders.of(self._root.module, value, known)

    def of_stages(self, module: nn.Module, program: Program) -> Schedule:
        """Return a schedule of ``module``, whose children are the program's stages, on the very parameters of this one's model.

        Its journal has the steps so far, which only this schedule can undo. Both know the same of each module.
        """
        root, journal = self._root, self._root.journal.sealed_copy()
        made = replace(root, module=module, journal=journal, program=program)
        made.holders, made.children, made.handles = Holders(), [], WeakValueDictionary()
        made.metadata[module] = root.metadata_of(root.module)
        return Schedule._of(made)

    @property
    def checked(self) -> Any:
        """For a primitive's ``apply``: what its ``check`` returned for this step."""
        return self._root.checked

    def touch(self, module: nn.Module) -> None:
        """Say that a module outside this one will be changed, so that a failure or ``undo`` restores it."""
        assert self._root.transaction is not None, "only a primitive's apply may change the model"
        self._root.transaction.touch(module)

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Add an action that takes back what the snapshot of modules cannot see; run newest first."""
        assert self._root.transaction is not None, "only a primitive's apply may change the model"
        self._root.transaction.on_undo(inverse)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and (self._root, self._path) == (other._root, other._path)

    def __hash__(self) -> int:
        return hash((id(self._root), self._path))

    def __str__(self) -> str:
        return self._repr_html_(html=False) or f"{self!r}\n{self.journal}".rstrip()

    def __repr__(self) -> str:
        module = paths.find(self._root.module, self._path)
        return f"Schedule({self._path!r}: {type(module).__name__ if module is not None else 'gone'})"


def create_schedule(
    root: nn.Module,
    name: str = "",
    path: str = "",
    parent: Schedule | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    example_inputs: Any = None,
    plugins: Registry | None = None,
) -> Schedule:
    """Start a schedule for a model. The model is changed in place by the steps, not by this call.

    One schedule at a time per model: a later call for the same model names its parameters anew.

    Args:
        root: The unmodified model.
        name: Name of the top schedule.
        path: With ``parent``: where ``root`` is below it.
        parent: The schedule ``root`` belongs to; the result is then a handle of that schedule.
        group: Tensor-parallel process group; default: the mesh's ``tp`` axis, or the world.
        mesh: Device mesh with named axes out of ``pp``, ``dp``, ``tp``.
        example_inputs: One batch to trace with: a tensor, a tuple of positional or a dict of keyword arguments, or
            ``(args, kwargs)``.
        plugins: Registry to look primitives up in; default: all installed plugins.

    Raises:
        ScheduleError: ``root`` is no module, or not at ``path`` below ``parent``; the mesh has other axes or lacks this rank.
    """
    refused = partial(ScheduleError, path=parent.path if parent is not None else "", primitive="create_schedule")
    if not isinstance(root, nn.Module):
        raise refused(f"cannot schedule a {type(root).__name__}; give an nn.Module")
    if parent is not None:
        handle = parent[path or name]
        if handle.mod is not root:
            raise refused(f"the module at {path or name!r} is another one")
        return handle
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise refused(f"mesh is a {type(mesh).__name__}; give a torch DeviceMesh")
    axes = mesh.mesh_dim_names if mesh is not None else ()
    if mesh is not None and (not axes or list(axes) != [axis for axis in ("pp", "dp", "tp") if axis in axes]):
        raise refused(f"the mesh has axes {axes}; name them out of 'pp', 'dp', 'tp', in this order")
    if mesh is not None and mesh.get_coordinate() is None:
        raise refused(f"the mesh leaves out this rank, {dist.get_rank()}; make it of all ranks that schedule the model")
    shared = Root(root, type(root).__qualname__, name, plugins or default_registry(), group, mesh, example_inputs)
    try:
        ties = {tensor: tensor for tensor in name_parameters(root) if isinstance(tensor, nn.Parameter)}
    except RecursionError as err:
        raise refused("a module of the model contains itself; take it out of its inside") from err
    shared.metadata_of(root).tie_weights = ties
    shared.registry.notify("slapo_after_create", schedule=Schedule._of(shared))
    return Schedule._of(shared)
