"""Compilers for ``fuse``: each makes one function of a region of a model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.nn import functional as F

from slapo_core import Entry, Schedule, ScheduleError, UnknownNameError, failure_reason
from slapo_tracing.nodes import is_opaque

from .cpu_operators import CpuLayer, DropoutFunction, call_norm, dropout, fast_dropout, gelu, gelu_formula, layer_norm

LAYER = "slapo_layer"
"""Key in the ``meta`` of a node that calls a layer: the layer's path and class."""
SAME_DRAWS = {"fallback_random": True}
"""Options of inductor for random numbers as eager torch draws them."""


class Compiler(Protocol):
    """Compiler that a plugin registers by ``slapo_compilers``."""

    def __call__(self, region: fx.GraphModule) -> Callable[..., Any]:
        """Return a function with the positional arguments, results and gradients of the region.

        Args:
            region: The region, without parameters. A layer of the model is an argument that the region calls: the compiled
                function gets the layer at the time of the call.

        Raises:
            ScheduleError: this region cannot be compiled.
        """


def inductor(region: fx.GraphModule) -> Callable[..., Any]:
    """Compile the region by ``torch.compile``, at its first call and again for new shapes or dtypes.

    Dropout draws the masks of the unmodified model from the same random state. On a CPU a layer norm is torch's own kernel, and
    a GELU computes its derivative in the forward.
    """
    return _compile_region(with_cpu_operators(region))


def inductor_fast_dropout(region: fx.GraphModule) -> Callable[..., Any]:
    """Compile as ``inductor``, with other dropout masks on a CPU; drawing the unmodified model's takes half of the time there.

    The masks have the same distribution, come from the same generator, and repeat for the same seed.
    """
    return _compile_region(with_cpu_operators(region, fast_dropout))


def _compile_region(region: fx.GraphModule) -> Callable[..., Any]:
    graphs = [part.graph for part in region.modules() if isinstance(part, fx.GraphModule)]
    is_called = any(graph.find_nodes(op="call_function", target=gelu) for graph in graphs)
    options: dict[str, Any] = dict(SAME_DRAWS)
    if is_called or any(isinstance(part, CpuLayer) and part.function is gelu for part in region.modules()):
        from . import _torch_inductor_pass  # noqa: PLC0415 - takes seconds

        options |= _torch_inductor_pass.options({torch.ops.slapo.gelu.default: gelu_formula})
    return torch.compile(region, options=options)


def with_cpu_operators(region: fx.GraphModule, draw: DropoutFunction = dropout) -> fx.GraphModule:
    """Return a copy of the region with operators for dropout, layer norm and GELU that are faster on a CPU."""
    graph = copy.deepcopy(region.graph)
    called = {str(node.target): region.get_submodule(str(node.target)) for node in graph.find_nodes(op="call_module")}
    parts = {path: _cpu_operator(part, draw) for path, part in called.items()}
    replacements = {F.dropout: draw, F.layer_norm: layer_norm, F.gelu: gelu, call_layer: call_norm}
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = replacements.get(node.target, node.target)
    return fx.GraphModule(parts, graph, "Region")


def _cpu_operator(part: nn.Module, draw: DropoutFunction) -> nn.Module:
    if isinstance(part, fx.GraphModule):
        return with_cpu_operators(part, draw)
    functions: dict[type, Callable[..., torch.Tensor]] = {nn.Dropout: draw, nn.LayerNorm: layer_norm, nn.GELU: gelu}
    return CpuLayer(part, functions[type(part)]) if type(part) in functions else part


def torchscript(region: fx.GraphModule) -> Callable[..., Any]:
    """Compile by ``torch.jit.script``; raise ``ScheduleError`` for layers with weights and operations that it does not know."""
    if layers := [_layer_of(node) for node in region.graph.nodes if node.target is call_layer]:
        what = f"TorchScript takes no layers with weights, as {layers[0][0]!r}"
        raise ScheduleError(f"{what}; leave these out of the subgraph, or use 'inductor'")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises torch.compile, which is the default here
            return torch.jit.script(region)
    except Exception as error:  # its compiler may raise anything
        raise ScheduleError(f"TorchScript cannot compile the subgraph: {failure_reason(error)}; use 'inductor'") from error


def one_matmul(region: fx.GraphModule) -> Callable[..., Any]:
    """Run Linear layers of one input as one matrix product with their concatenated weights.

    The weights stay in the layers and are concatenated at each call: one copy, for fewer and larger products. The layers run
    one by one if one was sharded, hooked or wrapped later, or if only some have a bias.

    Raises:
        ScheduleError: the region is not a group of such layers.
    """
    calls: list[Any] = [node for node in region.graph.nodes if node.op not in ("placeholder", "output")]
    results: Any = region.graph.output_node().args[0]
    inputs = {node.args[1:] for node in calls}
    is_side_by_side = len(calls) > 1 and len(inputs) == 1 and all(len(node.args) == 2 and not node.kwargs for node in calls)
    if not is_side_by_side or not all(node.target is call_layer and _layer_of(node)[1] is nn.Linear for node in calls):
        raise ScheduleError("'one_matmul' takes Linear layers of one input, side by side; use 'inductor'")
    names = [node.name for node in region.graph.find_nodes(op="placeholder")]
    x, layers = names.index(calls[0].args[1].name), [names.index(node.args[0].name) for node in calls]
    order = [calls.index(node) for node in results]

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        found = _side_by_side(args[x], [args[place] for place in layers])
        return tuple(found[place] for place in order)

    return run


def _layer_of(node: fx.Node) -> tuple[str, type]:
    """Return path and class of the layer that a node calls.

    A pickled graph loses both; it was checked before it was pickled, so the default only has to pass.
    """
    found: tuple[str, type] = node.meta.get(LAYER, (str(node.args[0]), nn.Linear))
    return found


def _side_by_side(x: torch.Tensor, layers: list[Any]) -> Sequence[torch.Tensor]:
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    if any(type(layer) is not nn.Linear or is_opaque(layer) for layer in layers) or len(biases) not in (0, len(layers)):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight for layer in layers])
    found = F.linear(x, weight, torch.cat(biases) if biases else None)
    return torch.split(found, [layer.weight.shape[0] for layer in layers], dim=-1)


def eager(region: fx.GraphModule) -> Callable[..., Any]:
    """Return the region uncompiled."""
    return region


def call_layer(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer with its present weights and hooks."""
    return layer(*args, **kwargs)


def compiler_of(schedule: Schedule, name: object) -> Compiler:
    """Import and return the compiler of this name. Without an exact match the case of letters is ignored: ``"TorchScript"``.

    Raises:
        ScheduleError: no plugin registers it.
        PluginError: a plugin's hook fails, two register one name, or it cannot be imported.
    """
    found = schedule.registry.entries_of_hook("slapo_compilers", "compiler")
    lowered = str(name).lower()
    known = [each for each in found if each == name] or [each for each in found if each.lower() == lowered]
    if not isinstance(name, str) or len(known) != 1:
        unknown = UnknownNameError.of("compiler", str(name), found, ["None compiles nothing"])
        raise ScheduleError(str(unknown), path=schedule.path, primitive="fuse")
    entry, *others = found[known[0]]
    if others:
        raise Entry.conflict(found[known[0]])
    return entry.load()  # type: ignore[no-any-return]
