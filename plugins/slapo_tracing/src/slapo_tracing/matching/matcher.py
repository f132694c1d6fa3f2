"""Search for nodes and subgraphs by data flow and constants, in about linear time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn

from slapo_core import Schedule, ScheduleError, paths

from ..nodes.opaque_modules import is_opaque
from .operators import COMMUTATIVE, bound_arguments, default_arguments, operator_of, signatures_of
from .patterns import ModulePattern, Pattern, PatternTracer, call_module

Handle: TypeAlias = tuple[str, fx.Node]
"""Path of the module whose graph holds the node, and the node."""
_Bindings: TypeAlias = dict[fx.Node, Any]


class Place(NamedTuple):
    """Place where a node of a match receives a value from outside: the node, and the index among its input nodes."""

    node: fx.Node
    number: int


class Match(list[Handle]):
    """The nodes of one occurrence of a pattern, in graph order.

    Attributes:
        path: Path of the module whose graph contains the nodes.
        inputs: Values of the pattern's arguments, in order: constants, or a ``Place``, since the node that makes a value may be
            replaced before this match is.
        outputs: Nodes of the pattern's results, in order.
        pattern: The pattern; None if the match was saved and the pattern could not be.
    """

    def __init__(
        self,
        path: str,
        nodes: Iterable[fx.Node],
        inputs: list[Any],
        outputs: list[fx.Node],
        pattern: CompiledPattern | None = None,
    ) -> None:
        super().__init__((path, node) for node in sorted(nodes))
        self.path, self.outputs, self.pattern = path, outputs, pattern
        self.inputs = [self._place_of(value) if isinstance(value, fx.Node) else value for value in inputs]

    def _place_of(self, value: fx.Node) -> Place:
        return next(Place(node, node.all_input_nodes.index(value)) for _, node in self if value in node.all_input_nodes)


def traced_modules(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield path and module of every traced module under ``root``, including itself."""
    for name, module in root.named_modules():
        if isinstance(module, fx.GraphModule):
            yield ".".join(filter(None, (prefix, name))), module


def find_node(root: nn.Module, wanted: str | Callable[[fx.Node], bool], prefix: str = "") -> list[Handle]:
    """Return nodes of the graphs of ``root`` and of the traced modules inside.

    Args:
        root: A traced module, or one that contains some.
        wanted: A regular expression that the path of a called module matches fully, or a function of a node.
        prefix: Path of ``root``, which prefixes the returned paths.
    """
    if isinstance(wanted, str):
        fits = _expression(wanted).fullmatch
        return find_node(root, lambda node: node.op == "call_module" and bool(fits(str(node.target))), prefix)
    return [(where, node) for where, module in traced_modules(root, prefix) for node in module.graph.nodes if wanted(node)]


def check_query(wanted: Any) -> None:
    """Raise ``ScheduleError`` for an argument that ``find_node`` does not take."""
    if isinstance(wanted, str):
        _expression(wanted)
    elif not callable(wanted):
        raise ScheduleError(f"find: {wanted!r:.60} is neither a regular expression nor a function of a node")


def find_subgraph(root: nn.Module, pattern: Callable[..., Any] | Pattern | CompiledPattern, prefix: str = "") -> list[Match]:
    """Return the occurrences of a pattern in the graphs of ``root`` and of the traced modules inside; they never overlap.

    Args:
        root: As for ``find_node``, and so is ``prefix``.
        pattern: A function of tensors or a ``Pattern``. Its arguments are the inputs, its results the outputs.
    """
    compiled = pattern if isinstance(pattern, CompiledPattern) else CompiledPattern(pattern)
    return [match for where, module in traced_modules(root, prefix) for match in _Search(compiled, where, module).matches()]


def match_data(match: Sequence[Handle]) -> dict[str, Any]:
    """Return a match as plain data for ``match``. Constants among its inputs are not converted."""
    data: dict[str, Any] = {"nodes": [[path, node.name, node.op, _target(node)] for path, node in match]}
    if isinstance(match, Match):
        data["inputs"] = [{"of": v.node.name, "input": v.number} if isinstance(v, Place) else v for v in match.inputs]
        data["outputs"] = [node.name for node in match.outputs]
    return data


def match(schedule: Schedule, data: Any) -> list[Handle]:
    """Return the match that ``match_data`` described, in the traced modules of a schedule.

    Raises:
        ScheduleError: the graph has no such node, or another one of that name.
    """
    nodes: dict[str, fx.Node] = {}
    for path, name, op, target in data["nodes"]:
        module = paths.find(schedule.root_module, path)
        named = {node.name: node for node in module.graph.nodes} if isinstance(module, fx.GraphModule) else {}
        if name not in named or (named[name].op, _target(named[name])) != (op, target):
            what = f"the graph of {path!r} has no node {name!r} that calls {target}"
            raise ScheduleError(f"{what}; trace the module as it was when the match was found", path=path)
        nodes[name] = named[name]
    if "inputs" not in data:
        return [(path, nodes[name]) for path, name, *_ in data["nodes"]]
    inputs = [Place(nodes[v["of"]], v["input"]) if isinstance(v, dict) else v for v in data["inputs"]]
    pattern = CompiledPattern(data["pattern"]) if data.get("pattern") is not None else None
    return Match(data["nodes"][0][0], nodes.values(), inputs, [nodes[name] for name in data["outputs"]], pattern)


def match_at(pattern: CompiledPattern, module: fx.GraphModule, node: fx.Node) -> Match | None:
    """Return the occurrence of a pattern whose first output is this node, in any graph of the module; None if there is none."""
    return _Search(pattern, "", module, node.graph).match_at(node)


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as err:
        raise ScheduleError(f"find: {text!r} is not a regular expression: {err}; escape what is meant literally") from err


def _target(node: fx.Node) -> str:
    """Return a node's target as text, without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(node.target))


class _PatternCall(NamedTuple):
    """One call in a pattern."""

    key: Any
    """Regular expression of the module's path, a module of the same class and settings, or the operator."""
    args: Sequence[Any]
    kwargs: dict[str, Any]


class CompiledPattern:
    """A pattern as a graph. Immutable."""

    def __deepcopy__(self, memo: Any) -> CompiledPattern:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # a pattern may be any function; without it nodes are told by what they call

    def __init__(self, pattern: Callable[..., Any] | Pattern) -> None:
        if not isinstance(pattern, (Pattern, FunctionType)):
            raise TypeError(f"find takes a function or a Pattern, not {type(pattern).__name__}")
        self.source = pattern
        tracer = PatternTracer()
        one = pattern if isinstance(pattern, ModulePattern) else None
        try:
            self.graph = tracer.trace((lambda x: one.forward(x)) if one is not None else pattern)
        except Exception as err:  # a user's function may raise anything
            advice = "use plain operations on its arguments, and call_module(name, ...) for a module"
            raise ScheduleError(f"find: the pattern cannot be traced: {type(err).__name__}: {err}; {advice}") from err
        self.inputs = self.graph.find_nodes(op="placeholder")
        result: Any = self.graph.output_node().args[0]
        self.outputs: list[fx.Node] = list(result) if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(node, fx.Node) and node.op.startswith("call") for node in self.outputs):
            raise ScheduleError("find: a pattern returns results of operations; this one returns an input or a constant")
        self.calls = {node: _pattern_call(node, tracer.root) for node in self.graph.nodes if node.op.startswith("call")}


def _pattern_call(node: fx.Node, root: nn.Module) -> _PatternCall:
    if node.target is call_module:
        return _PatternCall(_expression(str(node.args[0])), node.args[1:], node.kwargs)
    if node.op == "call_module":
        return _PatternCall(root.get_submodule(str(node.target)), node.args, node.kwargs)
    return _PatternCall(operator_of(node), node.args, node.kwargs)


def _is_same_module(module: nn.Module, wanted: nn.Module) -> bool:
    """Return True if two modules and all modules inside have the same class and settings, and ``module`` has no hooks."""
    if type(module) is not type(wanted) or is_opaque(module) or module._modules.keys() != wanted._modules.keys():
        return False
    ours, theirs = ({k: v for k, v in vars(each).items() if k[0] != "_" and k != "training"} for each in (module, wanted))
    shapes = [{k: None if v is None else v.shape for k, v in each._parameters.items()} for each in (module, wanted)]
    if ours.keys() != theirs.keys() or shapes[0] != shapes[1]:
        return False
    settings = all(_is_same_value(ours[key], theirs[key]) for key in ours)
    return settings and all(map(_is_same_module, module.children(), wanted.children()))


class _Search:
    """Search for all occurrences of one pattern in one graph of a module."""

    def __init__(self, pattern: CompiledPattern, path: str, module: fx.GraphModule, graph: fx.Graph | None = None) -> None:
        self.pattern, self.path, self.module = pattern, path, module
        self.graph = module.graph if graph is None else graph
        self.used: set[fx.Node] = set()

    def matches(self) -> Iterator[Match]:
        """Yield the occurrences in the order of the nodes of their first output."""
        for candidate in self._candidates(self.pattern.outputs[0]):
            if (match := self.match_at(candidate)) is not None:
                yield match

    def match_at(self, candidate: fx.Node) -> Match | None:
        anchor, *rest = self.pattern.outputs
        for bound in self._node(anchor, candidate, {}):
            complete = next(self._outputs(rest, bound), None)
            if complete is None:
                continue
            nodes = [complete[node] for node in self.pattern.calls if node in complete]
            self.used.update(nodes)
            inputs = [complete.get(node) for node in self.pattern.inputs]
            return Match(self.path, nodes, inputs, [complete[node] for node in self.pattern.outputs], self.pattern)
        return None

    def _candidates(self, wanted: fx.Node) -> list[fx.Node]:
        return [node for node in self.graph.nodes if self._fits(wanted, node)]

    def _fits(self, wanted: fx.Node, node: fx.Node) -> bool:
        key = self.pattern.calls[wanted].key
        if isinstance(key, re.Pattern):
            return node.op == "call_module" and bool(key.fullmatch(str(node.target)))
        if isinstance(key, nn.Module):
            return node.op == "call_module" and _is_same_module(self.module.get_submodule(str(node.target)), key)
        return node.op in ("call_function", "call_method") and bool(operator_of(node) == key)

    def _outputs(self, wanted: list[fx.Node], bound: _Bindings) -> Iterator[_Bindings]:
        """Yield the ways to bind the other outputs, searched forward from the bound nodes."""
        missing = [node for node in wanted if node not in bound]
        if not missing:
            yield bound
            return
        start = self._unbound_neighbour(missing[0], bound)
        if start is None:
            candidates, start = self._candidates(missing[0]), missing[0]
        else:
            shared = next(node for node in start.all_input_nodes if isinstance(bound.get(node), fx.Node))
            candidates = sorted(bound[shared].users)
        for candidate in candidates:
            for more in self._node(start, candidate, bound):
                yield from self._outputs(wanted, more)

    def _unbound_neighbour(self, output: fx.Node, bound: _Bindings) -> fx.Node | None:
        """Return an unbound node of the pattern with a bound input, among the nodes that ``output`` is made from."""
        todo = [output]
        for node in todo:
            if node not in bound and any(isinstance(bound.get(other), fx.Node) for other in node.all_input_nodes):
                return node
            todo += node.all_input_nodes
        return None

    def _node(self, wanted: fx.Node, node: Any, bound: _Bindings) -> Iterator[_Bindings]:
        """Yield the ways to bind ``wanted`` to ``node``, and the nodes that ``wanted`` is made from."""
        if wanted in bound:
            if _is_same_value(bound[wanted], node):
                yield bound
        elif wanted.op == "placeholder":
            yield {**bound, wanted: node}
        elif isinstance(node, fx.Node) and node not in self.used and self._fits(wanted, node):
            if any(value is node and other in self.pattern.calls for other, value in bound.items()):
                return
            key, args, kwargs = self.pattern.calls[wanted]
            module = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
            signatures = signatures_of(node, module)
            theirs = bound_arguments(signatures, node.args, node.kwargs)
            ours = bound_arguments(signatures if module is not None else signatures_of(wanted, None), args, kwargs)
            if any(isinstance(ours[name], fx.Node) for name in ours.keys() - theirs.keys()):  # an argument may be the default
                defaults = default_arguments(signatures, node.args, node.kwargs)
                theirs = {**{name: defaults[name] for name in ours.keys() & defaults.keys()}, **theirs}
            for exchanged in _operand_orders(key, theirs):
                yield from self._values(ours, exchanged, {**bound, wanted: node})

    def _values(self, wanted: Any, value: Any, bound: _Bindings) -> Iterator[_Bindings]:
        """Yield the ways to match an argument of the pattern with one of the graph."""
        if isinstance(wanted, fx.Node):
            yield from self._node(wanted, value, bound)
        elif isinstance(wanted, dict):
            if isinstance(value, dict) and wanted.keys() == value.keys():
                yield from self._match_all([(wanted[key], value[key]) for key in wanted], bound)
        elif isinstance(wanted, (tuple, list)):
            if isinstance(value, (tuple, list)) and len(wanted) == len(value):
                yield from self._match_all(list(zip(wanted, value, strict=True)), bound)
        elif isinstance(wanted, slice):
            if isinstance(value, slice):
                yield from self._values([wanted.start, wanted.stop, wanted.step], [value.start, value.stop, value.step], bound)
        elif _is_same_value(wanted, value):
            yield bound

    def _match_all(self, pairs: list[tuple[Any, Any]], bound: _Bindings) -> Iterator[_Bindings]:
        if not pairs:
            yield bound
            return
        for more in self._values(*pairs[0], bound):
            yield from self._match_all(pairs[1:], more)


def _is_same_value(a: Any, b: Any) -> bool:
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    if isinstance(a, float):
        return type(a) is type(b) and repr(a) == repr(b)  # 0.0 and -0.0 are two
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b))


def _operand_orders(key: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments, and for a commutative operator also with the operands exchanged."""
    yield arguments
    if isinstance(key, str) and key in COMMUTATIVE and arguments.keys() == {"self", "other"}:
        yield {"self": arguments["other"], "other": arguments["self"]}
