"""``sch.fuse(subgraph)``: operations of a traced module as one, compiled call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from slapo_core import Primitive, Schedule, ScheduleError
from slapo_tracing.editing import Subgraph, graph_edit, resolve_nodes
from slapo_tracing.matching import matches_of
from slapo_tracing.nodes import is_opaque

from ._torch_private import is_dry_run
from .compilers import LAYER, Compiler, call_layer, compiler_of, eager


class FusePrimitive(Primitive):
    """Run a subgraph of this traced module as one call, compiled.

    Rewrite:
        sch.fuse(match):      y = gelu(x + bias)      -->  y = fused(x, bias)
        sch.fuse(match):      q, k = wq(x), wk(x)     -->  q, k = fused(x, wq, wk)

    Layers with weights stay in place under their names, and the fused call gets them as arguments. Later changes of weights,
    replaced layers and hooks take effect; with a hook the region runs uncompiled.

    Args:
        subgraph: One match or a list of matches of ``sch.find``, or an argument of it: a chain of operations, or several side
            by side. Equal matches share compiled code.
        compiler: ``"inductor"``: ``torch.compile``, with the dropout masks of the unmodified model.
            ``"inductor_fast_dropout"``: the same with masks of equal distribution. ``"torchscript"``, also
            ``"TorchScript"``: ``torch.jit.script``. ``"one_matmul"``: Linear layers of one input as one matrix product. None:
            no compilation; a chain of modules without weights becomes an ``nn.Sequential``. Plugins add others by
            ``slapo_compilers``.
        name: Name of the new submodules, ``fused`` by default; a name in use gets a number.

    Raises:
        ScheduleError: no match; a match that is gone, cannot be one call, or calls a layer that is sharded, hooked or wrapped;
            an unknown compiler, or one that cannot compile the subgraph.
    """

    name = "fuse"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, subgraph: Any, compiler: str | None = "inductor", name: str | None = None) -> list[Any]:
        if name is not None and not (isinstance(name, str) and name.isidentifier()):
            raise _error(schedule, f"name is {name!r}; give a name a submodule can have")
        make = eager if compiler is None else compiler_of(schedule, compiler)
        prepared = []
        for match in matches_of(schedule, subgraph, "fuse"):
            traced = graph_edit.traced_module_of(schedule, match)
            _check_layers(schedule, traced, match)
            graph_edit.check_replace(schedule, match, lambda *inputs: inputs)
            prepared.append((match, *_region(traced, match)))
        _check_disjoint(schedule, [match for match, _, _ in prepared])
        functions: dict[Any, RegionFunction] = {}
        steps = []
        for match, region, layers in prepared:
            function = functions.setdefault(_region_key(region), RegionFunction(make, region))
            try:
                function.make()
            except ScheduleError as error:
                raise _error(schedule, str(error)) from error
            steps.append((match, _module(region, function, compiler), layers))
        return steps

    @staticmethod
    def apply(
        schedule: Schedule, subgraph: Any, compiler: str | None = "inductor", name: str | None = None, *, checked: list[Any]
    ) -> None:
        make = eager if compiler is None else compiler_of(schedule, compiler)
        remake = partial(_module_for_call, make, compiler)
        for match, fused, layers in checked:
            graph_edit.replace_subgraph(schedule, match, fused, name or "fused", layers=layers, remake=remake)


def _module(region: fx.GraphModule, function: RegionFunction, compiler: str | None) -> nn.Module:
    return (_chain(region) if compiler is None else None) or FusedRegion(region, function)


def _module_for_call(make: Compiler, compiler: str | None, traced: fx.GraphModule, part: Any) -> nn.Module:
    """Return the fused module for the same operations in the graph of another call, which may have other constants."""
    region, _ = _region(traced, part)
    return _module(region, RegionFunction(make, region), compiler)


class RegionFunction:
    """A region and its compiler; copies of it compile anew."""

    def __init__(self, compiler: Compiler, region: fx.GraphModule) -> None:
        self._compiler, self.region = compiler, region

    def make(self) -> Callable[..., Any]:
        """Return the compiled function, compiling it on the first call."""
        if self not in _compiled_functions:
            _compiled_functions[self] = self._compiler(self.region)
        return _compiled_functions[self]


# outside the objects, which are part of the model: a run must not change the model's state
_compiled_functions: WeakKeyDictionary[RegionFunction, Callable[..., Any]] = WeakKeyDictionary()


class FusedRegion(nn.Module):
    """One call for a region without weights. The region is not a child, so no search finds it as a traced module."""

    def __init__(self, region: fx.GraphModule, function: RegionFunction) -> None:
        super().__init__()
        self._function = function
        for name, child in region.named_children():
            self.add_module(name, child)

    def forward(self, *args: Any) -> Any:
        """Run the region, uncompiled if one of its layers was hooked, wrapped or sharded later."""
        called = [each for each in (*args, *self.children()) if isinstance(each, nn.Module)]
        is_as_compiled = torch.compiler.is_compiling() or not any(map(is_opaque, called))
        return (self._function.make() if is_as_compiled and not is_dry_run() else self._function.region)(*args)


def _check_disjoint(schedule: Schedule, matches: Sequence[Any]) -> None:
    seen: set[fx.Node] = set()
    for match in matches:
        nodes = {node for _, node in match}
        if nodes & seen:
            raise _error(schedule, f"node {(nodes & seen).pop().name!r} is in two of the subgraphs; fuse one after the other")
        seen |= nodes


def _check_layers(schedule: Schedule, traced: fx.GraphModule, match: Any) -> None:
    for node in resolve_nodes(traced, match):
        if node.op == "call_module" and is_opaque(traced.get_submodule(str(node.target))):
            what = f"{node.target!r} in the subgraph is sharded, hooked or wrapped"
            raise _error(schedule, f"{what}; leave it out, or fuse first")


def _region(traced: fx.GraphModule, match: Any) -> tuple[fx.GraphModule, list[str]]:
    """Return the nodes as a module without weights, and the paths of the layers that it takes as further arguments."""
    nodes = match.nodes if isinstance(match, Subgraph) else resolve_nodes(traced, match)
    paths = [str(node.target) for node in nodes if node.op == "call_module"]
    weighted = [path for path in dict.fromkeys(paths) if traced.get_submodule(path).state_dict()]
    body = graph_edit.extract(traced, match)
    graph = body.graph
    last = graph.find_nodes(op="placeholder")[-1:]
    layers: list[str] = []
    of_module = {id(traced.get_submodule(path)): path for path in weighted}
    arguments: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="call_module"):
        path = of_module.get(id(body.get_submodule(str(node.target))))
        if path is None:
            continue
        if path not in arguments:
            with graph.inserting_after(*last) if last else graph.inserting_before():
                arguments[path] = graph.placeholder(f"layer_{len(layers)}")
            last = [arguments[path]]
            layers.append(path)
        with graph.inserting_before(node):
            called = graph.call_function(call_layer, (arguments[path], *node.args), node.kwargs)
        called.meta.update(node.meta, **{LAYER: (path, type(traced.get_submodule(path)))})
        node.replace_all_uses_with(called)
        graph.erase_node(node)
    return fx.GraphModule(body, graph, "Region"), layers  # the new module keeps only children that the graph still calls


def _region_key(region: fx.GraphModule) -> Any:
    """Return a key that equal regions share; a region with modules, whose settings may differ, has a key of its own."""
    if list(region.children()):
        return id(region)
    number = {node: index for index, node in enumerate(region.graph.nodes)}

    def node_key(node: fx.Node) -> Any:
        arguments = fx.map_arg((node.args, node.kwargs), lambda other: f"%{number[other]}")
        _, layer = node.meta.get(LAYER, ("", None))
        return node.op, node.target if node.op.startswith("call") else None, layer, repr(arguments)

    return tuple(map(node_key, region.graph.nodes))


def _chain(region: fx.GraphModule) -> nn.Sequential | None:
    """Return a chain of modules as a ``Sequential``, or None if the region is not a chain."""
    nodes = [node for node in region.graph.nodes if node.op not in ("placeholder", "output")]
    previous, *others = region.graph.find_nodes(op="placeholder")
    for node in nodes:
        if others or node.op != "call_module" or node.args != (previous,) or node.kwargs:
            return None
        previous = node
    if region.graph.output_node().args != (previous,):
        return None
    return nn.Sequential(*(region.get_submodule(str(node.target)) for node in nodes))


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="fuse")
