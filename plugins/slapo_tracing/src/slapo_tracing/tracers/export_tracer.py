"""``torch.export`` as a tracer."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from slapo_core import TraceError

from ..graphs.guard import Guard
from ..graphs.traced_module import TracedModule
from ..nodes import _torch_private as private
from ..nodes.nested_values import getter
from ..nodes.opaque_modules import is_opaque
from .value_tracer import trace_again


def trace_export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
    """Return the graph of ``torch.export`` in this package's form: modules inlined, parameters under their names.

    Raises:
        TraceError: export refuses the module.
    """
    if is_opaque(module):
        raise TraceError(f"tracer 'export' takes the hooks of the {type(module).__name__} into the graph; use tracer='value'")
    guard = Guard.of(module, args, kwargs)
    try:
        exported = torch.export.export(module, args, kwargs, strict=False)
    except Exception as err:  # export raises errors of many types
        what = f"tracer 'export' cannot trace {type(module).__name__}: {str(err).splitlines()[0]}"
        raise TraceError(f"{what}; use tracer='value'") from err
    flat = exported.module(check_guards=False)
    assert isinstance(flat, fx.GraphModule)
    graph = fx.Graph()
    names = list(guard.parameters.parameters)
    values = {name: graph.placeholder(name) for name in guard.placeholders}
    copied: dict[fx.Node, fx.Node] = {}
    paths = private.leaf_paths((args, kwargs))
    for node, (kind, first, *rest) in zip(flat.graph.find_nodes(op="placeholder"), paths, strict=True):
        name = names[first] if kind == 0 else first
        if name in values:
            value, given = values[name], (args, kwargs)[kind][first]
            for key in rest:
                value, given = graph.call_function(getter(given), (value, key)), getter(given)(given, key)
            copied[node] = value
            value.meta.update(node.meta)
    for node in flat.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copied[node] = graph.node_copy(node, copied.__getitem__)
    result: Any = list(fx.node.map_arg(flat.graph.output_node().args[0], copied.__getitem__))  # type: ignore[arg-type]
    graph.output(graph.call_function(private.unflatten, (result, exported.call_spec.out_spec)))
    weights, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    held = {name for name, _ in [*weights, *buffers]}
    constants: dict[str, torch.Tensor] = {}
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in held:
            value = operator.attrgetter(str(node.target))(flat)
            node.target = f"_tensor_constant{len(constants)}"
            constants[node.target] = value
    inlined = [path for path, _ in module.named_modules() if path]
    return TracedModule(module, graph, guard, constants, inlined=inlined, retrace=trace_again)
