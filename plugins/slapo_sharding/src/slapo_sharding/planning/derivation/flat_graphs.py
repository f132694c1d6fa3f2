"""Flat graphs of a model, in which the layers that a sharding rule covers are calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import fx, nn

from slapo_core import Schedule, ScheduleError
from slapo_tracing import trace
from slapo_tracing.nodes import is_opaque

from ...rules.parametrization_hooks import parametrization_hooks
from ...rules.parametrizations import no_parametrization_in_forward, parametrization_of
from ...rules.rulebook import rules_of
from ..local_sizes.adapted_modules import is_inside
from ..local_sizes.size_origins import forget, remembered
from ..local_sizes.tensor_prototypes import without_prototypes
from .capturing_hooks import recorded_captures
from .replicated_modules import LeftWhole

_OF_LAYERS = (
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)
"""Modules of torch that call layers as other code does: with hooks on these they take no faster path."""


class TakenName(ScheduleError):
    """Error of a part that has a name which a graph uses itself."""


def trace_flat(schedule: Schedule, whole: LeftWhole) -> fx.GraphModule:
    """Return the graph of the module, in which it is known what sizes are computed from attributes.

    Args:
        schedule: Of the module.
        whole: Modules that cannot be traced, which become calls as well; those with hooks that compute are added.

    Raises:
        ScheduleError: hooks hide layers, or a part has a name that a graph uses itself.
        TraceError: the forward cannot be traced.
    """
    with recorded_captures(schedule.root_module):
        return _checked(schedule, whole)


def _checked(schedule: Schedule, whole: LeftWhole) -> fx.GraphModule:
    layers = [*layer_paths(schedule), *whole.opaque]
    _check_names(schedule)
    for path, module in schedule.mod.named_modules():
        if path and parametrization_hooks(module):
            if path not in layers:
                layers.append(path)
                whole.opaque[path] = f"its {parametrization_of(module)}"
        elif is_opaque(module) and any(layer == path or layer.startswith(f"{path}.") for layer in layers):
            raise _error(
                schedule, f"{path!r} has hooks or a wrapped forward, which hide its layers; call tensor_parallel first"
            )
    with remembered(schedule.mod, schedule.world_size), no_parametrization_in_forward() as parametrised:
        traced = flat_graph(schedule, layers)
    forget(traced.graph)
    paths = [path for path, module in schedule.mod.named_modules() if module in parametrised]
    paths = [path for path in paths if not any(is_inside(path, layer) for layer in layers if layer != path)]
    whole.layers.update(dict.fromkeys(paths, "a forward around it parametrises its tensors while it runs"))
    return traced


def _check_names(schedule: Schedule) -> None:
    """Refuse a model with a name that a traced module uses itself: it would be found in the place of the model's."""
    module = schedule.mod
    for name in (*module._modules, *module._parameters, *module._buffers):
        if name == "meta" or (hasattr(fx.GraphModule, name) and not hasattr(nn.Module, name)):
            what = f"the {type(module).__name__} calls a part of it {name!r}, as every traced module calls something of its own"
            raise TakenName(f"{what}; rename it, or give plan=", path=schedule.path, primitive="tensor_parallel")


def layer_paths(schedule: Schedule) -> list[str]:
    """Return the paths of the layers, tables and stacks that a sharding rule covers."""
    rules, named = rules_of(schedule), schedule.mod.named_modules()
    finds = (rules.is_layer, rules.is_table, rules.stack_cut)
    return [path for path, module in named if path and any(find(module) for find in finds)]


def called_paths(graph: fx.Graph) -> set[str]:
    """Return the paths of the modules that are calls in a flat graph; forwards may use the weights of others themselves."""
    return {str(node.target) for node in graph.find_nodes(op="call_module")}


def in_graph(modules: Collection[nn.Module], model: nn.Module, traced: fx.GraphModule) -> set[nn.Module]:
    """Return the modules that a graph has at the paths of some of the model's: it may hold copies."""
    paths = {path for path, module in model.named_modules(remove_duplicate=False) if module in modules}
    return {module for path, module in traced.named_modules(remove_duplicate=False) if path in paths}


def flat_graph(schedule: Schedule, layers: list[str]) -> fx.GraphModule:
    """Return the graph of the module in training mode, in which modules at these paths are calls.

    Raises:
        TraceError: the forward cannot be traced.
    """
    inputs = schedule.example_inputs
    with _training(schedule.mod), recorded_captures(schedule.root_module):
        traced = trace(
            schedule.root_module,
            flatten=True,
            leaf_modules=layers,
            target=schedule.path,
            example_inputs=inputs,
            symbolic=False,
            open_modules=_OF_LAYERS,
            assigned="returned" if schedule.path else "noted",  # what is around a part may read what that leaves behind
        )
    without_prototypes(traced.graph)
    return traced


@contextmanager
def _training(root: nn.Module) -> Iterator[None]:
    """Every module in training mode for a moment: what drops something is part of the graph then."""
    modes = {module: module.training for module in root.modules()}
    try:
        for module in modes:
            module.training = True
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="tensor_parallel")
