"""Compilers, which make one function of a region of a model."""

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

from .cpu_operators.dropout import Draw, Dropout, dropout, fast_dropout
from .cpu_operators.gelu import Gelu, gelu, options_for
from .cpu_operators.layer_norms import LayerNorm, call_norm, layer_norm

LAYER = "slapo_layer"
"""Key in the ``meta`` of a node that calls a layer: the layer's path and class."""
SAME_DRAWS = {"fallback_random": True}
"""An option of inductor, whose own numbers are others than torch's."""


class Compiler(Protocol):
    """Compiler that a plugin registers by ``slapo_compilers``."""

    def __call__(self, region: fx.GraphModule) -> Callable[..., Any]:
        """A function that computes what the region does, gradients included, from the same positional arguments.

        Args:
            region: Without parameters. A layer of the model is one of its arguments, and called in it: the compiled function
                gets the layer as it is at that time.

        Raises:
            ScheduleError: this region cannot be compiled.
        """


def inductor(region: fx.GraphModule) -> Callable[..., Any]:
    """``torch.compile`` of the region: compiled at its first call, and again for shapes or dtypes it has not seen.

    What it draws, as dropout does, is what the unmodified model draws from the same random state. On a CPU a layer norm is
    torch's own, and a GELU makes its derivative with its value.
    """
    return _compiled(with_parts_apart(region))


def inductor_fast_dropout(region: fx.GraphModule) -> Callable[..., Any]:
    """Compile as ``inductor``, but draw other masks on a CPU, where drawing the unmodified model's takes half of the time.

    They are equal in distribution, of the same generator, and the same again for the same seed.
    """
    return _compiled(with_parts_apart(region, fast_dropout))


def _compiled(region: fx.GraphModule) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(region, options=SAME_DRAWS | options_for(region))
    return compiled


def with_parts_apart(region: fx.GraphModule, draw: Draw = dropout) -> fx.GraphModule:
    """A region with the draws of dropouts, layer norms and GELUs as a CPU is faster at them. Its modules are the same."""
    graph = copy.deepcopy(region.graph)
    called = {str(node.target): region.get_submodule(str(node.target)) for node in graph.find_nodes(op="call_module")}
    parts = {path: _apart(part, draw) for path, part in called.items()}
    instead = {F.dropout: draw, F.layer_norm: layer_norm, F.gelu: gelu, call_layer: call_norm}
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = instead.get(node.target, node.target)
    return fx.GraphModule(parts, graph, "Region")


def _apart(part: nn.Module, draw: Draw) -> nn.Module:
    if isinstance(part, fx.GraphModule):
        return with_parts_apart(part, draw)
    if type(part) is nn.Dropout:
        return Dropout(part, draw)
    return LayerNorm(part) if type(part) is nn.LayerNorm else Gelu(part) if type(part) is nn.GELU else part


def torchscript(region: fx.GraphModule) -> Callable[..., Any]:
    """``torch.jit.script`` of the region, which takes operations on tensors alone.

    Raises:
        ScheduleError: the region calls a layer that holds weights, or an operation TorchScript does not know.
    """
    if layers := [_layer_of(node) for node in region.graph.nodes if node.target is call_layer]:
        raise ScheduleError(
            f"TorchScript takes no layers with weights, as {layers[0][0]!r}; leave these out of the subgraph, or use 'inductor'"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises torch.compile, which is the default here
            return torch.jit.script(region)
    except Exception as error:  # whatever its compiler raises
        raise ScheduleError(f"TorchScript cannot compile the subgraph: {failure_reason(error)}; use 'inductor'") from error


def one_matmul(region: fx.GraphModule) -> Callable[..., Any]:
    """Linear layers side by side, of one input, as one product with their weights behind one another.

    Weights stay those of the layers, and are put together at each call: a copy of them, for fewer and larger products. Where a
    layer has been sharded, hooked or wrapped since, or has a bias where another has none, each runs by itself.

    Raises:
        ScheduleError: the region is something else.
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
    """Path and class of the layer that a node calls; what was pickled since has forgotten both, and was compiled before."""
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
    """The region as it is."""
    return region


def call_layer(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A layer called as it is now, with its hooks."""
    return layer(*args, **kwargs)


def compiler_of(schedule: Schedule, name: object) -> Compiler:
    """The compiler of this name, imported now. Where there is none, the case of letters does not count: ``"TorchScript"``.

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
