"""Edits of a traced graph in place: replace nodes by one call, or extract them as a module.

The cost of an edit depends on the nodes it touches, not on the size of the graph. Every edit registers its undo action.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import fx, nn
from torch.fx.node import map_arg

from slapo_core import Schedule, ScheduleError, paths

from ..graphs.traced_module import TracedModule, compile_anew, subtree, variants_of
from ..graphs.variants import GraphOwner, meta_copy, with_removed_modules
from ..matching.matcher import Match, match_at
from ..nodes.forward_wrapping import forward_wrappers
from ..nodes.graph_comparison import Twins
from ..nodes.mode_regions import is_mode_node, write_mode_nodes
from ..nodes.symbolic_sizes import SIZE
from ..nodes.torch_calls import function_name
from ..recording.module_hooks import is_hooked
from .subgraph import NODES_BY_NAME, NewCall, Subgraph, current_node, is_in_graph


def check_replace(schedule: Schedule, nodes: Sequence[Any], new: Any) -> None:
    """Raise ``ScheduleError`` if ``replace_subgraph`` would with these arguments."""
    _check_call(new, Subgraph.of(traced_module_of(schedule, nodes).graph, nodes).inputs)


def replace_subgraph(
    schedule: Schedule,
    nodes: Sequence[Any],
    new: Any,
    name: str | None = None,
    *,
    layers: Sequence[str] = (),
    remake: Remake | None = None,
) -> str:
    """Replace ``nodes`` by one call, in the graphs of all calls of the traced module.

    The call receives the subgraph's inputs by position: those of a ``Match`` in the order of the pattern's arguments, others in
    the order of first use. Further parameters keep their defaults. Submodules that no other node uses are removed. The new
    module gets the mode of the traced one.

    Args:
        schedule: Its ``root_module`` contains the traced module; its ``touch`` and ``on_undo`` receive the undo actions.
        nodes: A ``Match``, or (path, node) pairs of one graph. Nodes from before an undo are found by name.
        new: A module or a function that returns the subgraph's result: a tensor, or a tuple if there are several outputs.
        name: Name of the new submodule; a number is added to a name that exists.
        layers: Paths of submodules of the traced module, passed after the inputs.
        remake: Makes the module again for the same nodes in the graph of another call, where their constants differ.

    Returns:
        The path of the new module in the traced module; for a function, the name of the node.

    Raises:
        ScheduleError: the nodes cannot be one call, or ``new`` does not take the inputs. Nothing was changed.
    """
    gm = traced_module_of(schedule, nodes)
    part = Subgraph.of(gm.graph, nodes)
    _check_call(new, [*part.inputs, *layers])
    variants = variants_of(gm)
    rewrite = _Replacement(part, remake)
    if variants is not None:
        variants.begin_rewrite(gm)
    made: list[fx.Node] = []
    schedule.on_undo(_undo_edit(gm, part, made))
    label = name or (type(new).__name__ if isinstance(new, nn.Module) else new.__name__.strip("<>")).lower()
    op, target = "call_function", new
    if isinstance(new, nn.Module):
        for module in new.modules() if new.training != gm.training else ():
            schedule.touch(module)
            module.training = gm.training
        op, target = "call_module", _add_module(schedule, gm.get_submodule(part.prefix()), part.prefix(), label, new)
    call = NewCall(op, target, label, tuple(layers))
    part.replace(call, made)
    rewrite.add(call, [node.name for node in made], gm)
    if variants is not None:
        variants.rewrites.append(rewrite)
        schedule.on_undo(partial(variants.rewrites.remove, rewrite))
    _drop_modules(schedule, gm, {str(node.target) for node in part.nodes if node.op == "call_module"})
    compile_anew(gm)
    return target if op == "call_module" else made[len(layers)].name


Remake = Callable[[fx.GraphModule, Subgraph], nn.Module]
"""``remake(traced, part)`` returns the module for a part of the graph of another call."""


class _Replacement:
    """A replacement that can be repeated on the graph of another call; implements ``variants.Rewrite``."""

    def __init__(self, part: Subgraph, remake: Remake | None) -> None:
        labels = _labels(part.inputs, {node.name: node for node in part.nodes})
        self.nodes = {node.name: _argument_text(node, labels) for node in part.nodes}
        self.draws = {node.name for node in part.nodes if node.meta.get("draws")}
        self.inputs = [_InputOrigin.of(value, part) if isinstance(value, fx.Node) else value for value in part.inputs]
        self.outputs = [node.name for node in part.outputs]
        self.remake, self.pattern = remake, part.pattern

    def add(self, call: NewCall, made: list[str], gm: fx.GraphModule) -> None:
        self.call, self.made = call, made
        self.tree = _called_modules(gm, call)

    def redo(self, module: GraphOwner, graph: fx.Graph, twins: Twins) -> None:
        """Repeat the replacement; raise ``ScheduleError`` if the graph lacks the nodes, or they compute something else."""
        if (match := self._match(module, twins)) is not None:
            made: list[fx.Node] = []
            Subgraph.of(graph, match).replace(self.call, made)
            twins.update(zip(self.made, made, strict=True))
            return
        inputs = [value.find_in_graph(twins, self) if isinstance(value, _InputOrigin) else value for value in self.inputs]
        if lost := [name for name in self.nodes if name not in twins]:
            raise self.missing_twin_error(lost[0])
        nodes = {name: twins[name] for name in self.nodes}
        part = Subgraph(graph, nodes.values(), inputs, [twins[name] for name in self.outputs])
        labels = _labels(inputs, nodes)
        changed = {name: form for name in self.nodes if (form := _argument_text(nodes[name], labels)) != self.nodes[name]}
        call = self._remake_call(module, part) if changed and self.remake is not None else self.call
        # a node may drop values in one mode alone, and so may a new module; a constant that it is given stays what it was
        has_modes = self.call.op == "call_module" and all(isinstance(value, _InputOrigin) for value in self.inputs)
        for name, form in changed.items() if self.remake is None else ():
            if not has_modes or (name not in self.draws and not nodes[name].meta.get("draws")):
                what = f"{name!r} computes something else in this call, with {form} for {self.nodes[name]}"
                raise ScheduleError(f"{self.call.label}: {what}")
        made = []
        part.replace(call, made)
        twins.update(zip(self.made, made, strict=True))

    def _match(self, module: GraphOwner, twins: Twins) -> Match | None:
        """Return the pattern's occurrence at the same place of another graph, possibly with other constants or values."""
        end = twins.get(self.outputs[0])
        if self.pattern is None or self.remake is not None or end is None:
            return None
        match = match_at(self.pattern, with_removed_modules(module), end)
        known = {twins[name] for name in self.nodes if name in twins}
        return match if match is not None and known <= {node for _, node in match} else None

    def missing_twin_error(self, name: str) -> ScheduleError:
        return ScheduleError(f"{self.call.label}: the graph of this call has nothing that corresponds to {name!r}")

    def _remake_call(self, module: GraphOwner, part: Subgraph) -> NewCall:
        assert self.remake is not None
        if _called_modules(module, self.call) != self.tree:
            what = f"{self.call.target!r} was changed since, and this call needs another one"
            raise ScheduleError(f"{self.call.label}: {what}")
        path, name = paths.split(str(self.call.target))
        parent = module.get_submodule(path)
        free = _free_name(parent, name)
        parent._modules[free] = self.remake(with_removed_modules(module), part).train(module.training)
        return self.call._replace(target=paths.join(path, free))


class _InputOrigin(NamedTuple):
    """Origin of an input: the node that makes the value, and the first replaced node that uses it, with the index there."""

    maker: str
    user: str
    number: int

    @classmethod
    def of(cls, value: fx.Node, part: Subgraph) -> _InputOrigin:
        users = (node for node in part.nodes if value in node.all_input_nodes)
        user = next(users, None)
        return cls(value.name, user.name if user else "", user.all_input_nodes.index(value) if user else 0)

    def find_in_graph(self, twins: Twins, rewrite: _Replacement) -> fx.Node:
        """Return this input in another graph: the value in the same place of its user's unique twin, else its maker's twin."""
        given = twins[self.user].all_input_nodes if self.user and rewrite.nodes.keys() <= twins.unique else []
        if self.number < len(given):
            return given[self.number]
        if self.maker not in twins:
            raise rewrite.missing_twin_error(self.maker)
        return twins[self.maker]


def _labels(inputs: Iterable[Any], nodes: Mapping[str, fx.Node]) -> dict[fx.Node, str]:
    """Return the names of a subgraph's nodes and inputs for ``_argument_text``, equal in the graphs of all calls."""
    outside = {value: f"input {number}" for number, value in enumerate(inputs) if isinstance(value, fx.Node)}
    return outside | {node: name for name, node in nodes.items()}


def _argument_text(node: fx.Node, labels: Mapping[fx.Node, str]) -> str:
    """Return a node's arguments as text. A size, which need not be an input, is described by its computation."""

    def label(other: fx.Node) -> str:
        if other in labels:
            return labels[other]
        return f"{other.target} of {_argument_text(other, labels)}" if SIZE in other.meta else function_name(other)

    return repr(map_arg((node.args, node.kwargs), label))


def _called_modules(module: nn.Module, call: NewCall) -> list[Any]:
    """Return the modules that a call runs, with their wrappers and hooks, for comparison."""
    if call.op != "call_module":
        return []
    found = []
    for path, each in module.get_submodule(str(call.target)).named_modules():
        variants = variants_of(each)
        is_changed = variants is not None and variants.is_changed
        found.append((path, each, len(forward_wrappers(each)), is_hooked(each), is_changed))
    return found


def traced_module_of(schedule: Schedule, nodes: Sequence[Any]) -> fx.GraphModule:
    """Return the traced module that contains the nodes of a match; raise ``ScheduleError`` if there is none."""
    if not nodes:
        raise ScheduleError("the subgraph is empty; give what find returned", path=schedule.path)
    where = {path for path, _ in nodes}
    path = next(iter(where))
    module = paths.find(schedule.root_module, path)
    if len(where) > 1 or not isinstance(module, fx.GraphModule):
        raise ScheduleError(f"no traced module holds all nodes of the subgraph, but {sorted(where)}", path=schedule.path)
    return module


def extract(gm: fx.GraphModule, nodes: Sequence[Any] | Subgraph) -> TracedModule:
    """Return the nodes as a module, which takes the subgraph's inputs by position and returns its outputs.

    It shares the parameters; ``gm`` is not changed. ``replace_subgraph`` can put it in place of the nodes.
    """
    part = nodes if isinstance(nodes, Subgraph) else Subgraph.of(gm.graph, nodes)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for value in part.inputs:
        known = isinstance(value, fx.Node)
        placeholder = graph.placeholder(value.name if known else "constant")  # a constant is in the nodes already
        if known:
            values[value] = placeholder
            placeholder.meta.update(value.meta)
    prefix = part.prefix()
    for node in part.nodes:
        if lost := [other.name for other in node.all_input_nodes if other not in values]:
            what = f"the subgraph also needs the size {lost[0]!r}, which is not an argument of the pattern"
            raise ScheduleError(f"{what}; make it one")
        values[node] = graph.node_copy(node, values.__getitem__)
        if node.op == "call_module":
            values[node].target = str(node.target).removeprefix(f"{prefix}.")
    results = [values[node] for node in part.outputs]
    graph.output(results[0] if len(results) == 1 else tuple(results))
    write_mode_nodes(graph)
    called = [str(node.target) for node in graph.find_nodes(op="call_module")]
    return TracedModule(subtree(gm.get_submodule(prefix), called), graph)


def _check_call(new: Any, inputs: list[Any]) -> None:
    try:
        signature = inspect.signature(new.forward if isinstance(new, nn.Module) else new)
    except ValueError:  # a builtin function without a signature
        return
    try:
        signature.bind(*inputs)
    except TypeError as err:
        what = f"{getattr(new, '__name__', type(new).__name__)}{signature} does not take {len(inputs)} inputs"
        raise ScheduleError(f"{what}: {err}; give it as many parameters") from err


def _undo_edit(gm: fx.GraphModule, part: Subgraph, made: list[fx.Node]) -> Callable[[], None]:
    """Return a function that restores a part of a graph to its present state: it erases ``made`` and recreates erased nodes."""
    places = []
    for node in sorted([*part.nodes, *part.dependents]):
        before = node.prev
        while is_mode_node(before):  # these come and go: they are written anew
            before = before.prev
        places.append((node, before))
    has_regions = any(node.prev is not before for node, before in places) or bool(part.dependents)
    changed = {*part.inside, *part.dependents, *(user for node in part.outputs for user in node.users)}
    arguments = [(node, (node.args, node.kwargs)) for node in changed]

    def put_back() -> None:
        graph = gm.graph
        now = partial(current_node, graph)
        for node, before in places:
            if is_in_graph(graph, node):
                now(before).append(node)
                continue
            with graph.inserting_after(now(before)):
                new = graph.create_node(node.op, node.target)
            new.name = node.name
            new.meta.update(node.meta)
            NODES_BY_NAME.setdefault(graph, {})[new.name] = new
        for node, former in arguments:
            now(node).args, now(node).kwargs = map_arg(former, now)
        for node in reversed(made):
            graph.erase_node(now(node))
        if has_regions:
            write_mode_nodes(graph)
        compile_anew(gm)

    return put_back


def _add_module(schedule: Schedule, parent: nn.Module, path: str, name: str, module: nn.Module) -> str:
    """Register a module under a free name, and return its path."""
    free = _free_name(parent, name)
    schedule.touch(parent)
    parent._modules[free] = module
    return paths.join(path, free)


def _free_name(parent: nn.Module, name: str) -> str:
    free, number = name, 1
    while hasattr(parent, free):
        free, number = f"{name}_{number}", number + 1
    return free


def _drop_modules(schedule: Schedule, gm: fx.GraphModule, called: set[str]) -> None:
    """Remove the modules at these paths that no node uses any more, directly or in part."""
    targets = {str(node.target) for op in ("call_module", "get_attr") for node in gm.graph.find_nodes(op=op, sort=False)}
    for path in called:
        if path not in targets and not any(target.startswith(f"{path}.") for target in targets):
            parent, name = paths.split(path)
            schedule.touch(gm.get_submodule(parent))
            variants = variants_of(gm)
            if variants is not None and path not in variants.removed_modules:
                variants.removed_modules[path] = meta_copy(gm.get_submodule(path))
                schedule.on_undo(partial(variants.removed_modules.__delitem__, path))
            del gm.get_submodule(parent)._modules[name]
