"""The schedule: a cursor into the live module tree.

A ``Schedule`` is a dotted path and a shared ``Root``. The module tree is the single source of truth, so a rewrite needs no
update of other handles. A handle whose module was removed raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..interfaces.program import Renderable
from ..modules import paths
from ..modules.holders import Holders, Place
from ..modules.parameters import name_parameters, parameter_facts
from ..registration.registry import Registry, default_registry, reserve_names
from ..reporting.errors import ScheduleError, UnknownNameError
from .journal import Journal, Step
from .steps import Root, ScheduleMetadata, schedule_method, take_step

if TYPE_CHECKING:
    from ..interfaces.program import Program


class _ScheduleClass(type):
    """Metaclass of ``Schedule``, so that ``help(Schedule.shard)`` describes ``sch.shard``."""

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return schedule_method(default_registry(), name)


@reserve_names
class Schedule(Renderable, metaclass=_ScheduleClass):
    """One module of a model, and the methods that say how it runs: ``sch["h.0.mlp"].checkpoint()``.

    Every installed primitive is a method; ``dir(sch)`` lists them. A primitive returns the schedule, or its own value.
    Primitives change the model through ``replace_module``, ``set_parameter``, ``touch`` and ``on_undo``.

    Example:
        >>> sch = create_schedule(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> sch["1"].replace(nn.Tanh())
        Schedule('1': Tanh)
        >>> sch.undo().name, sch["1"].mod
        ('replace', ReLU())
    """

    __slots__ = ("__weakref__", "_path", "_root")
    _root: Root
    _path: str

    def __init__(
        self, mod: nn.Module, name: str = "", path: str = "", parent: Schedule | None = None, group: Any = None, **options: Any
    ) -> None:
        """Start a schedule; the arguments are those of ``create_schedule``."""
        made = create_schedule(mod, name, path, parent, group, **options)
        self._root, self._path = made._root, made._path
        self._root.handles[self._path] = self

    @classmethod
    def _handle(cls, root: Root, path: str = "") -> Schedule:
        handle = root.handles.get(path)
        if handle is None:
            handle = root.handles[path] = object.__new__(cls)
            handle._root, handle._path = root, path
        return handle

    @property
    def mod(self) -> nn.Module:
        """The module, looked up at each access.

        Raises:
            ScheduleError: an earlier step removed it.
        """
        found = paths.find(self._root.module, self._path)
        if found is None:
            raise ScheduleError(f"the module {self._path!r} is gone; a step removed it after this handle", path=self._path)
        return found

    @property
    def name(self) -> str:
        """Last part of the path; for the top schedule the ``name`` passed to ``create_schedule``."""
        return paths.split(self._path)[1] if self._path else self._root.name

    @property
    def path(self) -> str:
        """Dotted path from the top module; ``""`` is the top module itself."""
        return self._path

    @property
    def parent(self) -> Schedule | None:
        """The schedule of the module that contains this one; None at the top."""
        return Schedule._handle(self._root, paths.split(self._path)[0]) if self._path else None

    @property
    def child(self) -> Mapping[str, Schedule]:
        """The schedules of the direct children, by name."""
        return {name: self._handle_at(name) for name, module in self.mod._modules.items() if module is not None}

    @property
    def root_module(self) -> nn.Module:
        """The top module."""
        return self._root.module

    def get_top_schedule(self) -> Schedule:
        """Return the schedule of the top module."""
        return Schedule._handle(self._root)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh, with axes out of ``pp``, ``dp``, ``tp``, or None."""
        return self._root.mesh

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel process group: the given one, the mesh's ``tp`` axis, or the world. None in one process."""
        root = self._root
        if root.group is None and root.mesh is None:
            return dist.group.WORLD if dist.is_initialized() else None
        return root.mesh_group if root.group is None else root.group

    @property
    def rank(self) -> int:
        """This process's rank in ``group``; 0 without a group, -1 if the process is not in it."""
        group = self.group
        # torch gives a number instead of a group that this process is not in
        return group.rank() if isinstance(group, dist.ProcessGroup) else 0 if group is None else -1

    @property
    def world_size(self) -> int:
        """Size of ``group``; 1 without a group, -1 if the process is not in it."""
        group = self.group
        return group.size() if isinstance(group, dist.ProcessGroup) else 1 if group is None else -1

    @property
    def metadata(self) -> ScheduleMetadata:
        """Metadata of this module. A module that ``replace`` puts in has new metadata."""
        return self._root.metadata_of(self.mod)

    @property
    def partition_idx(self) -> int | None:
        """The pipeline stage that ``slapo.pipeline.add_partition_notation`` assigned to the module, or None."""
        return self.metadata.partition_idx

    @property
    def registry(self) -> Registry:
        """The registry that this schedule looks primitives up in."""
        return self._root.registry

    @property
    def journal(self) -> Journal:
        """All steps of the whole model so far; ``print(sch.journal)`` shows them as Python."""
        return self._root.journal

    @property
    def program(self) -> Program | None:
        """The program of the last ``build``; None before it."""
        return self._root.program

    @property
    def target(self) -> str | None:
        """Dialect of the engine that ``build`` made of the model; None before it. Afterwards no step is possible."""
        return self._root.target

    @property
    def example_inputs(self) -> Any:
        """One batch of the top module's inputs, as passed to ``create_schedule``, or None. A primitive may set it."""
        return self._root.example_inputs

    @example_inputs.setter
    def example_inputs(self, inputs: Any) -> None:
        self.on_undo(partial(setattr, self._root, "example_inputs", self._root.example_inputs))
        self._root.example_inputs = inputs

    @property
    def original_names(self) -> dict[str, tuple[str, ...]]:
        """Current name, from the top, of every parameter below this module, to its names in the unmodified model.

        A tied parameter has several names; one that a step created has none.
        """
        named = self.mod.named_parameters(prefix=self._path)
        return {name: parameter_facts(parameter).names for name, parameter in named}

    def __getitem__(self, path: str) -> Schedule:
        """Return the schedule of the module at ``path`` below this one.

        Raises:
            UnknownNameError: no such module.
        """
        handle = self._handle_at(paths.resolve_aliases(self.mod, path))
        if paths.find(self._root.module, handle._path) is None:
            near = [paths.join(self._path, name) for name in paths.nearby(self.mod, path)]
            raise UnknownNameError.of("module", handle._path, near)
        return handle

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and paths.find(self.mod, paths.resolve_aliases(self.mod, path)) is not None

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, Schedule]]:
        """Yield the path below this module, after ``prefix``, and the schedule of each module: this one first, then all
        below.
        """
        for name, _ in list(self.mod.named_modules()):
            yield paths.join(prefix, name), self._handle_at(name)

    def select(self, pattern: str) -> list[Schedule]:
        """Return the schedules whose path below this one matches a glob: ``*`` within one name, ``**`` over any number of
        names.

        Raises:
            ScheduleError: nothing matches.
        """
        if not (found := dict(paths.select(self.mod, pattern))):
            known = UnknownNameError.of("module", pattern, paths.nearby(self.mod, pattern))
            raise ScheduleError(f"{known}", path=self._path, primitive="select")
        return [self._handle_at(name) for name in found]

    def _handle_at(self, path: str) -> Schedule:
        return Schedule._handle(self._root, paths.join(self._path, path))

    def apply(self, primitive: str, /, *args: Any, **kwargs: Any) -> Any:
        """Apply a primitive to this module: ``sch.apply("shard", "weight", axis=0)`` is ``sch.shard("weight", axis=0)``.

        Args:
            primitive: Name of an installed primitive.
            *args: Arguments of the primitive.
            **kwargs: Arguments of the primitive.

        Returns:
            This schedule, or the primitive's own value.

        Raises:
            UnknownNameError: no such primitive.
            ScheduleError: the step is illegal. After any error the model is as before the call.
        """
        return take_step(self, self._root, primitive, args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return MethodType(schedule_method(self._root.registry, name), self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._root.registry.names("primitive"), *self._root.registry.names("query")})

    def undo(self) -> Step:
        """Undo the last step, on whichever module, and return it. Steps before ``build`` cannot be undone."""
        self._root.holders.invalidate()
        return self._root.journal.undo()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the steps to ``*.json`` as data, or to ``*.py`` as code to edit. ``load_schedule`` reads both.

        Raises:
            ScheduleError: an argument of a step has no written form; names the step. No file is written.
        """
        self.journal.save(path, self._root.model)

    def replace_module(self, new: nn.Module) -> None:
        """Put ``new`` in this module's place, at every place of the tree that holds the module."""
        if self._path:
            parent, name = paths.split(self._path)
            self._put(self.mod, (self._root.module.get_submodule(parent), name), new)
        else:
            self._replace_root(new)

    def replace_modules(self, replacements: Mapping[nn.Module, nn.Module]) -> None:
        """Put modules in the places of others throughout the model, in one walk."""
        self._root.holders.invalidate()
        for module in list(self._root.module.modules()):
            for name, child in module._modules.items():
                if child is not None and child in replacements:
                    self.touch(module)
                    module._modules[name] = replacements[child]
        if self._root.module in replacements:
            self._replace_root(replacements[self._root.module])

    def share_metadata(self, known: nn.Module, new: nn.Module) -> None:
        """Give ``new`` the metadata of ``known``, if it has any; both see later changes."""
        if known in self._root.metadata:
            self._root.metadata[new] = self._root.metadata[known]

    def _replace_root(self, new: nn.Module) -> None:
        self.on_undo(partial(setattr, self._root, "module", self._root.module))
        self._root.module = new
        self._root.holders.invalidate()

    def set_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in the place of a parameter or buffer of this module, at every place where it is tied.

        Args:
            name: Its name in this module, e.g. ``"weight"``.
            tensor: Usually made by ``successor``, which carries the facts over.
        """
        mod = self.mod
        old = mod._buffers[name] if mod._parameters.get(name) is None else mod._parameters[name]
        assert old is not None
        self._put(old, (mod, name), tensor)

    def _put(self, old: nn.Module | torch.Tensor, known: Place, new: nn.Module | torch.Tensor) -> None:
        places = self.places_of(old, known)
        for holder, _ in places:
            self.touch(holder)
        self._root.holders.substitute(places, old, new)

    def places_of(self, value: nn.Module | torch.Tensor, known: Place | None = None) -> list[Place]:
        """Return every ``(module, attribute name)`` of the model that holds this very module or tensor.

        Args:
            value: A module, parameter or buffer; several places hold it if it is shared or tied.
            known: One of the places, if the caller knows one.
        """
        return self._root.holders.places_of(self._root.module, value, known)

    def stage_schedule(self, module: nn.Module, program: Program) -> Schedule:
        """Return a schedule of ``module``, whose children are the program's stages, on the parameters of this schedule's
        model.

        Its journal has the steps so far, which only this schedule can undo. Both share the metadata of modules.
        """
        root, journal = self._root, self._root.journal.sealed_copy()
        made = replace(root, module=module, journal=journal, program=program)
        made.holders, made.children, made.handles = Holders(), [], WeakValueDictionary()
        made.metadata[module] = root.metadata_of(root.module)
        return Schedule._handle(made)

    def touch(self, module: nn.Module) -> None:
        """Announce a change of a module outside this one, so that a rollback or ``undo`` restores it."""
        assert self._root.transaction is not None, "only a primitive's apply may change the model"
        self._root.transaction.touch(module)

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Add an action that undoes a change outside of the touched modules. The newest action runs first."""
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
    """Return a new schedule of a model. Its steps change the model in place; this call does not.

    A model has one schedule at a time: a later call for the same model names its parameters anew.

    Args:
        root: The unmodified model.
        name: Name of the top schedule.
        path: With ``parent``: path of ``root`` below it.
        parent: The schedule of a model that contains ``root``; the result is a handle of that schedule.
        group: Tensor-parallel process group; default: the mesh's ``tp`` axis, or the world.
        mesh: Device mesh with named axes out of ``pp``, ``dp``, ``tp``.
        example_inputs: One batch to trace with: a tensor, a tuple of positional or a dict of keyword arguments, or ``(args,
            kwargs)``.
        plugins: Registry to look primitives up in; default: all installed plugins.

    Raises:
        ScheduleError: ``root`` is not a module, or not at ``path`` below ``parent``; the mesh has other axes or lacks this
            rank.

    Example:
        >>> sch = create_schedule(nn.Sequential(nn.Linear(4, 2)), example_inputs=torch.ones(3, 4))
        >>> sch["0"].mod.out_features, sch.world_size
        (2, 1)
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
        shared.metadata_of(root).tie_weights = {each: each for each in name_parameters(root) if isinstance(each, nn.Parameter)}
    except RecursionError as err:
        raise refused("a module of the model contains itself, or the modules are nested too deeply") from err
    shared.registry.notify("slapo_after_create", schedule=Schedule._handle(shared))
    return Schedule._handle(shared)
