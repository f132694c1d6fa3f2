"""A module tree as plain data: per module its class, steps, parameters and stages; alike neighbours are one node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slapo_core import Program, shard_spec
from slapo_tracing.nodes import forward_wrappers

from .short_values import join_first, printable, truncate
from .step_places import StepPlaces

_NUM_PARAMETERS, _NUM_STEPS = 6, 12
"""Largest numbers of parameters and of steps shown for one module."""
_NUM_REPEATED = 3
"""Modules inside from which on the same are not shown again."""


@dataclass
class ModuleNode:
    """One module, or several alike that follow each other.

    Args:
        name: Name in the module that holds it; ``"0-11"`` of several.
        kind: Its class.
        config: Its ``extra_repr``, on one line.
        steps: Steps on the module.
        parameters: Its own parameters, with shapes, ties and device.
        notes: Stages that run it, or the place of a shared module.
        borders: ``"before"`` and ``"after"`` it, where a stage ends there.
        held: Numbers of parameters on this rank in one of the modules, with all inside.
        total: Numbers of the whole parameters.
        is_split: True where this rank holds a part of one of its own parameters.
        children: Modules inside.
        model_inside: Path of an earlier module with the same modules inside, where these are several.
        copies: Number of modules that the node stands for.
        steps_inside: Primitives on modules inside of one.
        modules_inside: Number of modules inside of one.
        is_changed_inside: True where anything was done to a module inside.
    """

    name: str
    kind: str
    config: str
    steps: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    borders: tuple[str, ...] = ()
    held: int = 0
    total: int = 0
    is_split: bool = False
    children: list[ModuleNode] = field(default_factory=list)
    model_inside: str = ""
    copies: int = 1
    steps_inside: Counter[str] = field(default_factory=Counter)
    modules_inside: int = 0
    is_changed_inside: bool = False

    @property
    def is_changed(self) -> bool:
        """True where anything was done to the module itself."""
        return bool(self.steps or self.is_split)


class TreeBuilder:
    """Makes the nodes of one module tree.

    Args:
        names: Of the whole model's tied parameters, see ``tied_names``.
        places: The steps.
        program: Where it has several stages these are noted, and a parameter on the meta device is counted as freed.
    """

    def __init__(
        self, names: Mapping[int, tuple[str, ...]], places: StepPlaces | None = None, program: Program | None = None
    ) -> None:
        self._names, self._places = names, places or StepPlaces(())
        self._has_journal = places is not None
        self._stages: dict[str, set[int]] = {}
        self._are_freed = False
        if program is not None and len(program.stages) > 1:
            self._are_freed = not all(parameter.is_meta for parameter in program.module.parameters())
            for stage in program.stages:
                for path in stage.paths:
                    self._stages.setdefault(path, set()).add(stage.index)
        self._keys: dict[tuple[Any, ...], int] = {}
        self._models: dict[int, str] = {}  # number of an inside to the first path that has it
        self._paths: dict[int, str] = {}  # of modules seen
        self._counted: set[int] = set()  # parameters; of a tied one the first place counts

    def node(self, module: nn.Module, path: str = "", name: str = "") -> ModuleNode:
        """Return the node of a module and of all inside of it."""
        return self._node(module, path, name, set()).node

    def _node(self, module: nn.Module, path: str, name: str, around: set[int]) -> _KeyedNode:
        """Return a node with what it is compared by.

        Args:
            module: The module.
            path: Where it is.
            name: What the node is called.
            around: Stages of the closest module around it of which they are known.
        """
        node = ModuleNode(printable(name), printable(type(module).__name__), _config(module))
        node.steps = _limit_words(self._places.words.get(path, ()), _NUM_STEPS)
        node.borders = tuple(self._places.borders.get(path, ()))
        if (first := self._paths.setdefault(id(module), path)) != path:
            node.notes = (f"the module of {printable(first) or 'the top'}",)
            return _KeyedNode(node, self._key(node, path, 0), around)
        if not self._has_journal:
            node.notes = tuple(f"wrapped in {_wrapper_name(each)}" for each in forward_wrappers(module))
        own = self._stages.get(path, around)
        self._add_parameters(node, module, path)
        held = [(key, child) for key, child in vars(module)["_modules"].items() if child is not None]
        found = {key: self._node(child, join_path(path, key), key, own) for key, child in held}
        stages = own if path in self._stages else own.union(*(child.stages for child in found.values()))
        for child in found.values():
            _note_stages(child, stages)
        self._add_inside(node, path, found)
        inside = self._number(*chain.from_iterable((key, child.key) for key, child in found.items()))
        if node.modules_inside >= _NUM_REPEATED and (model := self._models.setdefault(inside, path)) != path:
            node.model_inside = printable(model)
        return _KeyedNode(node, self._key(node, path, inside, *sorted(stages if stages != around else ())), stages)

    def _key(self, node: ModuleNode, path: str, *inside: int) -> int:
        border = path if node.borders else ""  # is not folded
        return self._number(node.kind, node.config, node.steps, node.parameters, node.notes, border, *inside)

    def _number(self, *seen: Any) -> int:
        return self._keys.setdefault(seen, len(self._keys))

    def _add_inside(self, node: ModuleNode, path: str, found: dict[str, _KeyedNode]) -> None:
        for name, (child, _, _) in found.items():
            node.held, node.total = node.held + child.held, node.total + child.total
            node.modules_inside += 1 + child.modules_inside
            node.is_changed_inside |= child.is_changed or child.is_changed_inside
            if steps := self._places.names.get(join_path(path, name)):
                node.steps_inside.update(steps)
            if child.steps_inside:
                node.steps_inside.update(child.steps_inside)
        node.children = _merge_equal_siblings(found.values())

    def _add_parameters(self, node: ModuleNode, module: nn.Module, path: str) -> None:
        words = []
        for name, tensor in chain(vars(module)["_parameters"].items(), vars(module)["_buffers"].items()):
            if tensor is None:
                continue
            shape = ParameterShape.of(tensor)
            is_parameter, is_split = isinstance(tensor, nn.Parameter), shape is not None and bool(shape.split)
            if is_parameter or is_split:
                words.append(f"{printable(name)} {shape or 'without a shape yet'}{self._marks(tensor, join_path(path, name))}")
            node.is_split |= is_split
            if is_parameter and shape is not None and id(tensor) not in self._counted:
                self._counted.add(id(tensor))
                node.held += 0 if self._are_freed and tensor.is_meta else shape.held
                node.total += shape.total
        node.parameters = _limit_words(words, _NUM_PARAMETERS)

    def _marks(self, tensor: torch.Tensor, place: str) -> str:
        others = [printable(other) for other in self._names.get(id(tensor), ()) if other != place]
        meta = " meta" if tensor.is_meta else ""
        frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
        return f"{meta}{frozen}{' = ' if others else ''}{join_first(others, 2)}"


def join_path(path: str, name: str) -> str:
    """Return the path of what a module has under a name, which may be any text."""
    return f"{path}.{name}" if path else name


def tied_names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return the names of each parameter that has several, by its id. A shared module's parameters have one."""
    names: dict[int, list[str]] = {}
    for path, inner in module.named_modules():
        for name, parameter in vars(inner)["_parameters"].items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(join_path(path, name))
    return {key: tuple(found) for key, found in names.items() if len(found) > 1}


def _limit_words(words: Sequence[str], limit: int) -> tuple[str, ...]:
    more = len(words) - limit
    return (*words[:limit], *([f"{more} more"] if more > 0 else []))


def _config(module: nn.Module) -> str:
    try:
        return truncate(module.extra_repr())
    except Exception:  # a model's own code, of a half-made or changed module say; looking at it must not fail
        return ""


class _KeyedNode(NamedTuple):
    """A node with what it is compared by.

    Args:
        node: The node.
        key: Equal for alike nodes.
        stages: That run the module.
    """

    node: ModuleNode
    key: int
    stages: set[int]


def _note_stages(found: _KeyedNode, around: set[int]) -> None:
    """Note the stages of a module where they are not those of the module around it."""
    if found.stages and found.stages != around:
        word = "stage" if len(found.stages) == 1 else "stages"
        found.node.notes = (*found.node.notes, f"{word} {', '.join(map(str, sorted(found.stages)))}")


def _merge_equal_siblings(children: Iterable[_KeyedNode]) -> list[ModuleNode]:
    """Put alike neighbours together, each group under the names of its members."""
    nodes = []
    for _, group in groupby(children, lambda found: found.key):
        first, *others = group
        node = first.node
        if others:
            node.copies += len(others)
            node.name = _group_label([node.name, *(found.node.name for found in others)])
        nodes.append(node)
    return nodes


def _wrapper_name(wrapper: Any) -> str:
    """Return the name of a wrapper of a forward, such as ``CheckpointWrapper``."""
    return printable(str(getattr(wrapper, "__name__", type(wrapper).__name__)))


def _group_label(names: list[str]) -> str:
    if all(name.isdecimal() for name in names) and [*map(int, names)] == [*range(int(names[0]), int(names[0]) + len(names))]:
        return f"{names[0]}-{names[-1]}"
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"


class ParameterShape(NamedTuple):
    """Shapes of one parameter or buffer.

    Args:
        local: On this rank.
        whole: In the unmodified model.
        split: Mesh axes it is split over, with their sizes, e.g. ``("tp 4",)``.
    """

    local: tuple[int, ...]
    whole: tuple[int, ...]
    split: tuple[str, ...]

    @classmethod
    def of(cls, tensor: Any) -> ParameterShape | None:
        """Return the shapes of a shard, a DTensor, a parameter of ZeRO-3 or a plain tensor; None before it has any."""
        if is_lazy(tensor):
            return None
        local = whole = tuple(tensor.shape)
        split: list[str] = []
        if (partitioned := getattr(tensor, "ds_shape", None)) is not None and tuple(partitioned) != whole:
            local, whole, split = tuple(tensor.ds_tensor.shape), tuple(partitioned), ["ZeRO-3"]  # a range of the flat tensor
        if hasattr(tensor, "placements"):
            local, split = _local_shape(tensor), _mesh_axes(tensor)
        if (spec := shard_spec(tensor)) is not None and spec.num_shards > 1:
            whole, split = spec.full_shape, [*split, f"{spec.axis} {spec.num_shards}"]
        return cls(local, whole, tuple(split))

    @property
    def held(self) -> int:
        """Numbers on this rank."""
        return math.prod(self.local)

    @property
    def total(self) -> int:
        """Numbers of the whole parameter."""
        return math.prod(self.whole)

    def __str__(self) -> str:
        if len(self.local) == len(self.whole):
            sizes = zip(self.local, self.whole, strict=True)
            dims = f"[{', '.join(str(part) if part == size else f'{part} of {size}' for part, size in sizes)}]"
        else:
            dims = f"{list(self.local)} of {list(self.whole)}"
        return f"{dims} {' '.join(self.split)}".rstrip()


@torch.no_grad()
def _local_shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.to_local().shape)


def _mesh_axes(tensor: Any) -> list[str]:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"axis {dim}:" for dim in range(mesh.ndim)]
    placed = zip(names, mesh.shape, tensor.placements, strict=True)
    return [f"{name} {size}" for name, size, placement in placed if placement.is_shard() and size > 1]
