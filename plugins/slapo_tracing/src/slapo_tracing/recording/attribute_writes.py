"""State that a forward assigns to its modules. A graph does not repeat assignments, so the next call must not need them.

Caches are allowed. If something has changed, the forward runs once more, on the state that it left. If this call computes the
same without filling the caches, uses only constants and no random numbers, and leaves the same state, then so does every later
call.

Values that every call computes anew and leaves in an attribute, such as an attention map for plots, are allowed too, if the
second call does not use those of the first. A trace may note or return them, see ``Request.assigned``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from slapo_core import paths

from ..nodes.nested_values import Snapshot, contents, fingerprint, tensors_in
from ..nodes.symbolic_sizes import SIZE
from .attribute_reads import MODULE_ATTRIBUTES, attribute_facts

if TYPE_CHECKING:
    from .recorder import Recorder


_TABLES = ("_parameters", "_buffers", "_modules")
_MISSING = object()


class StateChange(NamedTuple):
    """Attribute or buffer of a module whose value has changed, as a whole or inside.

    Args:
        first: The first module that holds the changed value, and the name there; equal for all modules that share it.
        is_whole: True if the attribute itself was assigned, rather than something inside of its value.
    """

    module: nn.Module
    name: str
    first: tuple[nn.Module, str]
    is_whole: bool


def state_changes(modules: Iterable[nn.Module], before: Iterable[Snapshot]) -> Iterator[StateChange]:
    """Yield the changed state, once for each module that holds it."""
    changed = {id(part): old for snapshot in before for part, old in map(snapshot.parts.__getitem__, snapshot.changed_paths())}
    first: dict[Any, tuple[nn.Module, str]] = {}
    for module in modules if changed else ():
        for path, (part, _) in Snapshot(vars(module)).parts.items():
            old, new = changed.get(id(part), {}), contents(part) or {}
            for key in {**old, **new} if id(part) in changed else ():
                if old.get(key, _MISSING) is not new.get(key, _MISSING):
                    name = str(next(name for name in (*path, key) if name not in _TABLES))
                    yield StateChange(module, name, first.setdefault((id(part), key), (module, name)), not path)


class UsualAttributes:
    """Attributes of modules outside of all calls, to find those that the code around a module sets for some calls only."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._usual = {id(module): dict(vars(module)) for module in modules}

    def accept(self, module: nn.Module) -> None:
        """Accept the present attributes of a module and of the modules inside, which it has set itself."""
        self._usual |= {id(each): dict(vars(each)) for each in module.modules() if id(each) in self._usual}

    def find_unusual(self, module: nn.Module) -> tuple[nn.Module, str] | None:
        """Return the first module inside that has an unusual attribute, with its name; None if there is none."""
        return next(((each, name) for each in module.modules() for name in vars(each) if self.differs(each, name)), None)

    def differs(self, module: nn.Module, name: str) -> bool:
        """Return True if a module has an unusual value for an attribute."""
        usual = self._usual.get(id(module), vars(module))
        before, now = usual.get(name, _MISSING), vars(module).get(name, _MISSING)
        is_setting = name not in MODULE_ATTRIBUTES and name not in _TABLES
        return before is not now and is_setting and attribute_facts(before) != attribute_facts(now)


class RepeatedRun:
    """Comparison of a second recording with the first.

    Args:
        first: Path of each module with a graph to its recorder in the first run.
        modules: Modules that are part of these graphs.
        before: State of all modules before the first run.
        written: Attributes that may be left with other values, by id of the module and name.
        assigned: Attributes that may hold values that the forward computes from its inputs, if every call computes the same.
    """

    def __init__(
        self,
        first: Mapping[str, Recorder],
        modules: list[nn.Module],
        before: Iterable[Snapshot],
        written: Collection[tuple[int, str]] = (),
        assigned: Collection[tuple[nn.Module, str]] = (),
    ) -> None:
        self.first, self.modules, self.written, self.assigned = first, modules, written, assigned
        self.old = {id(value) for snapshot in before for _, parts in snapshot.parts.values() for value in parts.values()}
        self.known: dict[fx.Node, fx.Node] = {}
        """Node of the second run to the node of the first run with the same value."""
        self.left = self._state(first.values(), ())

    def difference(self, second: Mapping[str, Recorder], cause: StateChange) -> tuple[nn.Module, str] | None:
        """Return module and name of state that the second run leaves otherwise; of ``cause`` if only the graphs differ."""
        recorders = list(second.values())
        repeats = second.keys() == self.first.keys() and all(self._matches(self.first[path], second[path]) for path in second)
        for module, then, now in zip(self.modules, self.left, self._state(recorders, self.first.values()), strict=True):
            for name in {**then, **now}:
                if then.get(name) != now.get(name) and (id(module), name) not in self.written:
                    return module, name
        return None if repeats else cause[:2]

    def _state(self, recorders: Iterable[Recorder], earlier: Iterable[Recorder]) -> list[dict[str, Any]]:
        """Return the state of the modules after a run, with each tensor as the node that made it, in this or an earlier run."""
        computed = {id(tensor) for module, name in self.assigned for tensor in tensors_in(vars(module).get(name))}

        def identity_of(tensor: torch.Tensor) -> Any:
            own = next((each.nodes[id(tensor)] for each in recorders if id(tensor) in each.nodes), None)
            made = own or next((each.nodes[id(tensor)] for each in earlier if id(tensor) in each.nodes), None)
            node = None if made is None else self.known.get(made, made)
            is_same = node is not None and ((own is not None and id(tensor) in computed) or is_constant(node))
            return id(tensor) if id(tensor) in self.old else node if is_same else object()

        prints = [fingerprint(vars(module), identity_of)[1] for module in self.modules]
        return [{**{key: part for name in _TABLES for key, part in print_.pop(name)[1].items()}, **print_} for print_ in prints]

    def _matches(self, first: Recorder, second: Recorder) -> bool:
        """Return True if the second graph is the first without some nodes that make constants."""
        nodes, place = list(first.graph.nodes), 0
        for node in second.graph.nodes:
            same = first.constants.get(str(node.target)) is second.constants.get(str(node.target))
            start = 0 if SIZE in node.meta else place  # the code that filled the cache may have read the size earlier
            found = next((i for i in range(start, len(nodes)) if same and self._are_equal(nodes[i], node)), None)
            if found is not None and all(map(is_constant, nodes[place:found])):
                place, self.known[node] = max(place, found + 1), nodes[found]
                continue
            earlier = node.meta.get("earlier") or self.known.get(node.meta.get("alias") or _full_slice_source(node))
            if earlier is None or not is_constant(earlier):
                return False
            self.known[node] = earlier
        return True

    def _are_equal(self, one: fx.Node, other: fx.Node) -> bool:
        facts = [(node.op, node.target, node.meta.get("regions")) for node in (one, other)]
        if facts[0] != facts[1]:
            return False
        arguments: Any = map_arg((other.args, other.kwargs), lambda node: self.known.get(node, node))
        return bool(fingerprint((one.args, one.kwargs), id) == fingerprint(arguments, id))


def _full_slice_source(node: fx.Node) -> Any:
    """Return the node whose full extent a slicing node takes, as in ``mask[:n, :n]`` of a cached mask; else None."""
    if node.target is not operator.getitem or node.meta["val"].shape != node.args[0].meta["val"].shape:  # type: ignore[union-attr]
        return None
    slices = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return node.args[0] if all(isinstance(each, slice) and each.step in (None, 1) for each in slices) else None


def is_constant(node: fx.Node) -> bool:
    """Return True if a value depends on no input, trained weight or random number, and computing it has no other effects."""
    todo = [node]
    for other in todo:
        value = other.meta.get("val")
        if SIZE in other.meta:
            continue
        if other.op in ("placeholder", "call_module", "output") or other.meta.get("draws"):
            return False
        if value is not None and value.requires_grad:
            return False
        if other.meta.get("mutates") and any(given.op == "get_attr" for given in other.all_input_nodes):
            return False
        todo += [given for given in other.all_input_nodes if given not in todo]
    return True


def assigned_values(recorder: Recorder) -> dict[str, Any]:
    """Return the values that a forward has assigned to attributes of the modules in its graph, by dotted path.

    If a module keeps a cache, i.e. a constant in an attribute that the forward had read before, the module's constants are left
    out, since some describe the call that filled the cache. The second of two runs returns the paths of the first, whatever it
    assigns.
    """
    if recorder.earlier is not None:
        recorder.assigned = recorder.earlier.assigned
    else:
        for path in ("", *sorted(recorder.inlined)):
            names = _assigned_to(recorder, recorder.module.get_submodule(path))
            recorder.assigned += [paths.join(path, name) for name in names]
    places = {path: paths.split(path) for path in recorder.assigned}
    return {path: getattr(recorder.module.get_submodule(owner), name, None) for path, (owner, name) in places.items()}


def mark_assigned_tensors(recorder: Recorder) -> None:
    """Write the attributes that hold a tensor after the forward into ``meta["assigned"]`` of the tensor's node."""
    for path, value in assigned_values(recorder).items():
        for node in filter(None, (recorder.nodes.get(id(tensor)) for tensor in tensors_in(value))):
            node.meta.setdefault("assigned", []).append(path)


def _assigned_to(recorder: Recorder, module: nn.Module) -> list[str]:
    before = recorder.sandbox.attributes_before(module)
    own = {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
    is_written = {name: (id(module), name) in recorder.writes for name in own}
    changed = [name for name, value in own.items() if is_written[name] or before.get(name, _MISSING) is not value]
    constants = {name for name in changed if _has_constants_only(recorder, vars(module)[name])}
    has_cache = any((id(module), name) in recorder.reads_before for name in constants)
    return [name for name in changed if not has_cache or name not in constants]


def _has_constants_only(recorder: Recorder, value: Any) -> bool:
    nodes = [recorder.nodes.get(id(tensor)) for tensor in tensors_in(value)]
    return all(node is None or is_constant(node) for node in nodes)
