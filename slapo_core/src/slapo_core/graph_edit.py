"""Change a traced graph in place: put a module in the place of some nodes, or take nodes out as a module.

The cost of an edit follows the nodes it touches, not the graph. Every edit registers how to take it back.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import fx, nn
from torch.fx.node import map_arg

from . import paths
from .errors import ScheduleError
from .matching import Match, Place
from .tracing.regions import write_regions
from .tracing.traced_module import TracedModule, subtree

if TYPE_CHECKING:
    from .schedule import Schedule


def check_replace(schedule: Schedule, nodes: Sequence[Any], new: Any, *, concrete: Mapping[str, Any] | None = None) -> None:
    """Raise ``ScheduleError`` where ``replace_subgraph`` with these arguments would."""
    part = _Part(traced_module_of(schedule, nodes), nodes)
    part.check_convex()
    _check_call(new, part.inputs, concrete or {})


def replace_subgraph(
    schedule: Schedule, nodes: Sequence[Any], new: Any, name: str | None = None, *, concrete: Mapping[str, Any] | None = None
) -> str:
    """Put one call in the place of ``nodes``.

    It gets the subgraph's inputs by position: of a ``Match`` in the order of the pattern's arguments, else in the order of
    first use. Parameters that the inputs leave over keep their defaults. Submodules that no other node uses are dropped.

    Args:
        schedule: Its ``root_module`` holds the traced module; its ``on_undo`` gets the inverse actions.
        nodes: A ``Match``, or (path, node) pairs of one graph; nodes of before an undo are found by their names.
        new: A module or a function; returns what the subgraph returns: a tensor, or a tuple when there are several outputs.
        name: What to call the new submodule; a name that is taken gets a number.
        concrete: Further keyword arguments of the call.

    Returns:
        The path of the new module in the traced module; of a function, the name of the node.

    Raises:
        ScheduleError: The nodes cannot be one call, or ``new`` does not take the inputs; nothing was changed.
    """
    gm = traced_module_of(schedule, nodes)
    part = _Part(gm, nodes)
    part.check_convex()
    _check_call(new, part.inputs, concrete or {})
    edit = _Edit(gm, schedule.on_undo)
    label = name or (type(new).__name__ if isinstance(new, nn.Module) else new.__name__.strip("<>")).lower()
    op, target = "call_function", new
    if isinstance(new, nn.Module):
        op, target = "call_module", edit.add_module(part.prefix(), label, new)
    first, last = part.outputs[0], part.nodes[-1]
    meta = {**last.meta, "val": first.meta.get("val")} if len(part.outputs) == 1 else {"source": last.meta.get("source")}
    call = edit.create(last, op, target, tuple(part.inputs), dict(concrete or {}), meta, label)
    results = [call]
    if len(part.outputs) > 1:
        for index, output in enumerate(part.outputs):
            results.append(edit.create(results[-1], "call_function", operator.getitem, (call, index), {}, output.meta))
        results.pop(0)
    edit.move_after(results[-1], part.late)
    for output, result in zip(part.outputs, results, strict=True):
        edit.reroute(output, result, part.inside)
    edit.erase(reversed(part.nodes))
    if part.late:
        write_regions(gm.graph)
    edit.close()
    return target if op == "call_module" else call.name


def traced_module_of(schedule: Schedule, nodes: Sequence[Any]) -> fx.GraphModule:
    """The traced module whose graph the nodes of a match are in."""
    if not nodes:
        raise ScheduleError("the subgraph is empty; give what find returned", path=schedule.path)
    where = {path for path, _ in nodes}
    path = next(iter(where))
    module = paths.find(schedule.root_module, path)
    if len(where) > 1 or not isinstance(module, fx.GraphModule):
        raise ScheduleError(
            f"no traced module holds all nodes of the subgraph; they are in {sorted(where)}", path=schedule.path
        )
    return module


def extract(gm: fx.GraphModule, nodes: Sequence[Any]) -> TracedModule:
    """The nodes as a module of their own, which takes the subgraph's inputs by position and returns its outputs.

    It shares the parameters; ``gm`` is left as it is. ``replace_subgraph`` puts it in their place.
    """
    part = _Part(gm, nodes)
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
        values[node] = graph.node_copy(node, values.__getitem__)
        if node.op in ("get_attr", "call_module"):
            values[node].target = str(node.target)[len(prefix) + 1 if prefix else 0 :]
    results = [values[node] for node in part.outputs]
    graph.output(results[0] if len(results) == 1 else tuple(results))
    write_regions(graph)
    root = gm.get_submodule(prefix)
    return TracedModule(
        subtree(root, [str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")]), graph
    )


def resolve(gm: fx.GraphModule, nodes: Sequence[Any]) -> list[fx.Node]:
    """The nodes of ``gm`` now that the handles mean: by name where an undo has made them anew.

    Raises:
        ScheduleError: A node is no longer in the graph.
    """
    found = []
    for handle in nodes:
        node: fx.Node = handle[1] if isinstance(handle, tuple) else handle
        found.append(node if _is_in(gm.graph, node) else _by_name(gm.graph, node.name))
    return found


_NAMES: WeakKeyDictionary[fx.Graph, dict[str, fx.Node]] = WeakKeyDictionary()


def _is_in(graph: fx.Graph, node: fx.Node) -> bool:
    return node.graph is graph and node.prev.next is node


def _by_name(graph: fx.Graph, name: str) -> fx.Node:
    node = _NAMES.get(graph, {}).get(name)
    if node is None or not _is_in(graph, node) or node.name != name:
        _NAMES[graph] = {other.name: other for other in graph.nodes}
        node = _NAMES[graph].get(name)
    if node is None:
        raise ScheduleError(f"node {name!r} is no longer in the graph; find it again")
    return node


class _Part:
    """Some nodes of a graph, seen from outside: their inputs and outputs."""

    def __init__(self, gm: fx.GraphModule, nodes: Sequence[Any]) -> None:
        self.gm = gm
        if isinstance(nodes, Match):
            known = dict(zip((node for _, node in nodes), resolve(gm, nodes), strict=True))
            self.outputs = [known[node] for node in nodes.outputs]
            self.inputs = [known[v.node].all_input_nodes[v.number] if isinstance(v, Place) else v for v in nodes.inputs]
            self.nodes = sorted(known.values())
            self.inside = set(self.nodes)
        else:
            self.nodes = sorted(resolve(gm, nodes))
            self.inside = set(self.nodes)
            self.inputs = [
                *dict.fromkeys(other for node in self.nodes for other in node.all_input_nodes if other not in self.inside)
            ]
            self.outputs = [node for node in self.nodes if any(user not in self.inside for user in node.users)]
        if not self.outputs:
            raise ScheduleError("nothing uses the results of the subgraph; it can be left out of the model instead")
        self._check()
        self.late: list[fx.Node] = []

    def _check(self) -> None:
        for node in self.nodes:
            if not node.op.startswith("call"):
                raise ScheduleError(f"node {node.name!r} is a {node.op}; a subgraph consists of operations and module calls")
            outside = [user.name for user in node.users if user not in self.inside]
            if outside and node not in self.outputs:
                what = f"the value {node.name!r} inside the subgraph is also used outside, by {outside[0]!r}"
                raise ScheduleError(f"{what}; make it an output of the pattern")
        missing = [
            other.name
            for node in self.nodes
            for other in node.all_input_nodes
            if other not in self.inside and other not in self.inputs
        ]
        if missing:
            raise ScheduleError(
                f"the subgraph also needs the value {missing[0]!r}, which is no argument of the pattern; make it one"
            )
        regions = {node.meta.get("regions", ()) for node in self.nodes}
        if len(regions) > 1:
            raise ScheduleError("the subgraph is partly inside a no_grad or autocast region; take nodes of one region")

    def check_convex(self) -> None:
        """No way from an output back in over nodes outside; those that must come after the call are noted in ``late``."""
        last, seen = self.nodes[-1], set()
        todo = [user for node in self.outputs for user in node.users if user not in self.inside]
        for node in todo:
            if node in self.inside:
                raise ScheduleError(
                    f"a result of the subgraph comes back into it over nodes outside, at {node.name!r}; include those nodes"
                )
            if node not in seen and node < last:
                seen.add(node)
                todo += node.users
        self.late = sorted(seen)
        for node in self.inputs:
            if isinstance(node, fx.Node) and node in seen:
                raise ScheduleError(f"the input {node.name!r} is made from a result of the subgraph; include the nodes between")
        if seen and any(node.meta.get("mutates") for node in [*self.nodes, *self.late]):
            raise ScheduleError("an operation in place keeps the subgraph from being one call; take fewer nodes")

    def prefix(self) -> str:
        """Path of the innermost module that holds everything the nodes use."""
        used = [str(node.target).split(".") for node in self.nodes if node.op == "call_module"]
        used += [str(n.target).split(".") for n in self.inputs if isinstance(n, fx.Node) and n.op == "get_attr"]
        parents = [path[:-1] for path in used]
        if not parents:
            return ""
        common = []
        for names in zip(*parents, strict=False):
            if len(set(names)) > 1:
                break
            common.append(names[0])
        return ".".join(common)


def _check_call(new: Any, inputs: list[Any], concrete: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(new.forward if isinstance(new, nn.Module) else new)
    except ValueError:  # a builtin function without a signature
        return
    try:
        signature.bind(*inputs, **concrete)
    except TypeError as err:
        raise ScheduleError(
            f"{getattr(new, '__name__', type(new).__name__)}{signature} does not take {len(inputs)} inputs: {err}; "
            "give it as many parameters, or the rest by concrete"
        ) from err


_USES: WeakKeyDictionary[fx.Graph, tuple[int, Counter[str]]] = WeakKeyDictionary()
"""Per edited graph its length and how many nodes use each module or something in it."""


def _holders(node: fx.Node) -> list[str]:
    """The module a node uses and those that hold it."""
    names = str(node.target).split(".") if node.op in ("call_module", "get_attr") else []
    return [".".join(names[: depth + 1]) for depth in range(len(names))]


class _Edit:
    """Changes of one graph module, each with its inverse."""

    def __init__(self, gm: fx.GraphModule, on_undo: Callable[[Callable[[], None]], None]) -> None:
        self.gm, self.graph, self.on_undo = gm, gm.graph, on_undo
        length, uses = _USES.pop(self.graph, (-1, Counter()))
        if length != len(self.graph.nodes):  # the first edit, or others have edited
            uses = Counter(path for node in self.graph.nodes for path in _holders(node))
        self.uses = uses
        on_undo(self._undone)

    def _undone(self) -> None:
        _USES.pop(self.graph, None)
        self.gm.recompile()

    def close(self) -> None:
        """The edit is done."""
        _USES[self.graph] = len(self.graph.nodes), self.uses
        self.gm.recompile()

    def create(
        self, after: fx.Node, op: str, target: Any, args: Any, kwargs: Any, meta: Mapping[str, Any], name: str | None = None
    ) -> fx.Node:
        """A node behind ``after``, with the ``meta`` of what it stands for."""
        with self.graph.inserting_after(after):
            node = self.graph.create_node(op, target, args, kwargs, name)
        node.meta.update({key: meta[key] for key in ("source", "regions", "val") if key in meta})
        self._undo_by_name(self.graph.erase_node, node)
        self.uses.update(_holders(node))
        return node

    def reroute(self, old: fx.Node, new: fx.Node, inside: set[fx.Node]) -> None:
        """Let the users of ``old`` outside the subgraph use ``new``."""
        for user in list(old.users):
            if user not in inside and user is not new:
                user.replace_input_with(old, new)
                self._undo_by_name(lambda user, old, new: user.replace_input_with(new, old), user, old, new)

    def _undo_by_name(self, action: Callable[..., None], *nodes: fx.Node) -> None:
        self.on_undo(lambda: action(*resolve(self.gm, nodes)))

    def move_after(self, place: fx.Node, nodes: list[fx.Node]) -> None:
        """Move nodes behind ``place``, in their order."""
        for node in nodes:
            before = node.prev
            place.append(node)
            place = node
            self._undo_by_name(lambda before, node: before.append(node), before, node)

    def erase(self, nodes: Iterable[fx.Node]) -> None:
        """Take nodes out, with the weights only they used and the modules nobody else calls."""
        for node in nodes:
            if _is_in(self.graph, node):  # not gone already with its last user
                self._erase(node)

    def _erase(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        before, op, target, args, kwargs = node.prev, node.op, node.target, node.args, node.kwargs
        name, meta = node.name, dict(node.meta)

        def put_back() -> None:
            known = dict(zip(inputs, resolve(self.gm, inputs), strict=True))
            place = resolve(self.gm, [before])[0] if before.op != "root" else before
            with self.graph.inserting_after(place):
                new = self.graph.create_node(op, target, map_arg(args, known.__getitem__), map_arg(kwargs, known.__getitem__))
            new.name = name
            new.meta.update(meta)
            _NAMES.setdefault(self.graph, {})[name] = new

        self.uses.subtract(_holders(node))
        self.graph.erase_node(node)
        self.on_undo(put_back)
        if op in ("call_module", "get_attr"):
            self._drop_unused(str(target) if op == "call_module" else str(target).rpartition(".")[0])
        for other in inputs:
            if not other.users and (other.op == "get_attr" or other.target in (operator.getitem, getattr)):
                self._erase(other)

    def _drop_unused(self, path: str) -> None:
        if not path or self.uses[path]:
            return
        parent, _, name = path.rpartition(".")
        self._set_modules(self.gm.get_submodule(parent), name, None)

    def add_module(self, prefix: str, name: str, module: nn.Module) -> str:
        """Register a module under a free name; returns its path."""
        parent = self.gm.get_submodule(prefix)
        free, number = name, 1
        while hasattr(parent, free):
            free, number = f"{name}_{number}", number + 1
        self._set_modules(parent, free, module)
        return f"{prefix}.{free}" if prefix else free

    def _set_modules(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        table = parent._modules
        old, names = table.get(name), list(table) if name in table else []
        if module is None:
            del table[name]
        else:
            table[name] = module

        def put_back() -> None:
            table.pop(name, None)
            if names:  # in its old place
                rest = {**table, name: old}
                table.clear()
                table.update({key: rest.pop(key) for key in names if key in rest} | rest)

        self.on_undo(put_back)
