"""Change a traced graph in place: put a module in the place of some nodes, or take nodes out as a module.

The cost of an edit follows the nodes it touches, not the graph. Every edit registers how to take it back.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import fx, nn
from torch.fx.node import map_arg

from . import paths
from .errors import ScheduleError
from .matching import Match, Place
from .tracing.regions import is_region_node, write_regions
from .tracing.traced_module import TracedModule, subtree

if TYPE_CHECKING:
    from .schedule import Schedule


def check_replace(schedule: Schedule, nodes: Sequence[Any], new: Any) -> None:
    """Raise ``ScheduleError`` where ``replace_subgraph`` with these arguments would."""
    _check_call(new, _Part(traced_module_of(schedule, nodes), nodes).inputs)


def replace_subgraph(schedule: Schedule, nodes: Sequence[Any], new: Any, name: str | None = None) -> str:
    """Put one call in the place of ``nodes``.

    It gets the subgraph's inputs by position: of a ``Match`` in the order of the pattern's arguments, else in the order of
    first use. Parameters that the inputs leave over keep their defaults. Submodules that no other node uses are dropped. The
    new module is in the traced one's mode.

    Args:
        schedule: Its ``root_module`` holds the traced module; its ``touch`` and ``on_undo`` get what undoes the edit.
        nodes: A ``Match``, or (path, node) pairs of one graph; nodes of before an undo are found by their names.
        new: A module or a function; returns what the subgraph returns: a tensor, or a tuple when there are several outputs.
        name: What to call the new submodule; a name that is taken gets a number.

    Returns:
        The path of the new module in the traced module; of a function, the name of the node.

    Raises:
        ScheduleError: The nodes cannot be one call, or ``new`` does not take the inputs; nothing was changed.
    """
    gm = traced_module_of(schedule, nodes)
    part = _Part(gm, nodes)
    _check_call(new, part.inputs)
    made: list[fx.Node] = []
    schedule.on_undo(_put_back(gm, part, made))
    label = name or (type(new).__name__ if isinstance(new, nn.Module) else new.__name__.strip("<>")).lower()
    op, target = "call_function", new
    if isinstance(new, nn.Module):
        for module in new.modules() if new.training != gm.training else ():
            schedule.touch(module)
            module.training = gm.training
        op, target = "call_module", _add_module(schedule, gm.get_submodule(part.prefix()), part.prefix(), label, new)

    def insert(op: str, target: Any, args: tuple[Any, ...], name: str | None, like: fx.Node) -> fx.Node:
        with gm.graph.inserting_after([part.nodes[-1], *made][-1]):
            made.append(gm.graph.create_node(op, target, args, {}, name))
        made[-1].meta.update({key: like.meta[key] for key in ("source", "regions", "val") if key in like.meta})
        return made[-1]

    call = insert(op, target, tuple(part.inputs), label, part.outputs[0])
    results = [call]
    if len(part.outputs) > 1:
        call.meta.pop("val", None)
        get = operator.getitem
        results = [insert("call_function", get, (call, index), None, output) for index, output in enumerate(part.outputs)]
    for node, place in zip(part.late, [made[-1], *part.late], strict=False):
        place.append(node)
    for output, result in zip(part.outputs, results, strict=True):
        output.replace_all_uses_with(result, delete_user_cb=lambda user: user not in part.inside)
    for node in reversed(part.nodes):
        gm.graph.erase_node(node)
    _drop_modules(schedule, gm, {str(node.target) for node in part.nodes if node.op == "call_module"})
    if part.late:
        write_regions(gm.graph)
    gm._variants.start_from(gm.graph)
    return target if op == "call_module" else call.name


def traced_module_of(schedule: Schedule, nodes: Sequence[Any]) -> fx.GraphModule:
    """The traced module whose graph the nodes of a match are in."""
    if not nodes:
        raise ScheduleError("the subgraph is empty; give what find returned", path=schedule.path)
    where = {path for path, _ in nodes}
    path = next(iter(where))
    module = paths.find(schedule.root_module, path)
    if len(where) > 1 or not isinstance(module, fx.GraphModule):
        raise ScheduleError(f"no traced module holds all nodes of the subgraph, but {sorted(where)}", path=schedule.path)
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
        if node.op == "call_module":
            values[node].target = str(node.target).removeprefix(f"{prefix}.")
    results = [values[node] for node in part.outputs]
    graph.output(results[0] if len(results) == 1 else tuple(results))
    write_regions(graph)
    called = [str(node.target) for node in graph.find_nodes(op="call_module")]
    return TracedModule(subtree(gm.get_submodule(prefix), called), graph)


def resolve(gm: fx.GraphModule, nodes: Sequence[Any]) -> list[fx.Node]:
    """The nodes of ``gm`` now that the handles mean: by name where an undo has made them anew.

    Raises:
        ScheduleError: A node is no longer in the graph.
    """
    return [_now(gm.graph, node) for _, node in nodes]


_NAMES: WeakKeyDictionary[fx.Graph, dict[str, fx.Node]] = WeakKeyDictionary()


def _is_in(graph: fx.Graph, node: fx.Node) -> bool:
    return node.graph is graph and node.prev.next is node


def _now(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if _is_in(graph, node):
        return node
    found = _NAMES.get(graph, {}).get(node.name)
    if found is None or not _is_in(graph, found) or found.name != node.name:
        _NAMES[graph] = {other.name: other for other in graph.nodes}
        found = _NAMES[graph].get(node.name)
    if found is None:
        raise ScheduleError(f"node {node.name!r} is no longer in the graph; find it again")
    return found


class _Part:
    """Some nodes of a graph that can be one call, seen from outside.

    Attributes:
        nodes: Themselves, in graph order.
        inputs: Values from outside.
        outputs: Those of the nodes that are used outside.
        late: Nodes outside that stand between them and need an output, and so must come after the call.
    """

    def __init__(self, gm: fx.GraphModule, nodes: Sequence[Any]) -> None:
        now = resolve(gm, nodes)
        self.nodes, self.inside = sorted(now), set(now)
        if isinstance(nodes, Match):
            known = dict(zip((node for _, node in nodes), now, strict=True))
            self.outputs = [known[node] for node in nodes.outputs]
            self.inputs = [known[v.node].all_input_nodes[v.number] if isinstance(v, Place) else v for v in nodes.inputs]
        else:
            inputs = dict.fromkeys(other for node in self.nodes for other in node.all_input_nodes)
            self.inputs = [other for other in inputs if other not in self.inside]
            self.outputs = [node for node in self.nodes if any(user not in self.inside for user in node.users)]
        if not self.outputs:
            raise ScheduleError("nothing uses the results of the subgraph; it can be left out of the model instead")
        for node in self.nodes:
            self._check(node)
        if len({node.meta.get("regions", ()) for node in self.nodes}) > 1:
            raise ScheduleError("the subgraph is partly inside a no_grad or autocast region; take nodes of one region")
        self.late = self._late()

    def _check(self, node: fx.Node) -> None:
        if not node.op.startswith("call"):
            raise ScheduleError(f"node {node.name!r} is a {node.op}; a subgraph consists of operations and module calls")
        outside = [user.name for user in node.users if user not in self.inside]
        if outside and node not in self.outputs:
            what = f"the value {node.name!r} inside the subgraph is also used outside, by {outside[0]!r}"
            raise ScheduleError(f"{what}; make it an output of the pattern")
        for other in node.all_input_nodes:
            if other not in self.inside and other not in self.inputs:
                what = f"the subgraph also needs the value {other.name!r}, which is no argument of the pattern"
                raise ScheduleError(f"{what}; make it one")

    def _late(self) -> list[fx.Node]:
        span = [self.nodes[0]]
        while span[-1] is not self.nodes[-1]:
            span.append(span[-1].next)
        late: dict[fx.Node, None] = {}
        for node in span:
            needed = [other for other in node.all_input_nodes if other in late]
            if node in self.inside and needed:
                what = f"a result of the subgraph comes back into it over nodes outside, at {node.name!r}"
                raise ScheduleError(f"{what}; include those nodes")
            if needed or (node not in self.inside and any(output in node.all_input_nodes for output in self.outputs)):
                late[node] = None
        for value in self.inputs:
            if isinstance(value, fx.Node) and (value in late or value in self.inside):
                what = f"the input {value.name!r} is made from a result of the subgraph"
                raise ScheduleError(f"{what}; include the nodes between")
        if len(span) > len(self.nodes) and any(node.meta.get("mutates") for node in span):
            raise ScheduleError("an operation in place keeps the subgraph from being one call; take fewer nodes")
        return list(late)

    def prefix(self) -> str:
        """Path of the innermost module that holds every module the nodes call."""
        parents = [str(node.target).split(".")[:-1] for node in self.nodes if node.op == "call_module"]
        return ".".join(os.path.commonprefix(parents))


def _check_call(new: Any, inputs: list[Any]) -> None:
    try:
        signature = inspect.signature(new.forward if isinstance(new, nn.Module) else new)
    except ValueError:  # a builtin function without a signature
        return
    try:
        signature.bind(*inputs)
    except TypeError as err:
        raise ScheduleError(
            f"{getattr(new, '__name__', type(new).__name__)}{signature} does not take {len(inputs)} inputs: {err}; "
            "give it as many parameters"
        ) from err


def _put_back(gm: fx.GraphModule, part: _Part, made: list[fx.Node]) -> Callable[[], None]:
    """What gives a part of a graph back as it is now, without the nodes ``made`` since; erased ones are made anew."""
    places = []
    for node in sorted([*part.nodes, *part.late]):
        before = node.prev
        while is_region_node(before):  # these come and go: they are written anew
            before = before.prev
        places.append((node, before))
    has_regions = any(node.prev is not before for node, before in places) or bool(part.late)
    changed = {*part.inside, *part.late, *(user for node in part.outputs for user in node.users)}
    arguments = [(node, (node.args, node.kwargs)) for node in changed]

    def put_back() -> None:
        graph = gm.graph
        now = partial(_now, graph)
        for node, before in places:
            if _is_in(graph, node):
                now(before).append(node)
                continue
            with graph.inserting_after(now(before)):
                new = graph.create_node(node.op, node.target)
            new.name = node.name
            new.meta.update(node.meta)
            _NAMES.setdefault(graph, {})[new.name] = new
        for node, former in arguments:
            now(node).args, now(node).kwargs = map_arg(former, now)
        for node in reversed(made):
            graph.erase_node(now(node))
        if has_regions:
            write_regions(graph)
        gm._variants.start_from(gm.graph)

    return put_back


def _add_module(schedule: Schedule, parent: nn.Module, path: str, name: str, module: nn.Module) -> str:
    """Register a module under a free name; returns its path."""
    free, number = name, 1
    while hasattr(parent, free):
        free, number = f"{name}_{number}", number + 1
    schedule.touch(parent)
    parent._modules[free] = module
    return paths.join(path, free)


def _drop_modules(schedule: Schedule, gm: fx.GraphModule, called: set[str]) -> None:
    """Remove the modules at these paths that no node uses any more, nor anything in them."""
    targets = {str(node.target) for op in ("call_module", "get_attr") for node in gm.graph.find_nodes(op=op, sort=False)}
    for path in called:
        if path not in targets and not any(target.startswith(f"{path}.") for target in targets):
            parent, name = paths.split(path)
            schedule.touch(gm.get_submodule(parent))
            del gm.get_submodule(parent)._modules[name]
