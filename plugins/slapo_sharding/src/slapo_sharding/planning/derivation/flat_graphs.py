"""Flat graphs of a model: all modules are inlined but the layers that a sharding rule covers, which are calls."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from slapo_core import Schedule, ScheduleError
from slapo_tracing import trace
from slapo_tracing.nodes import is_opaque

from ...rules.parametrizations import no_parametrization_in_forward, parametrization_hooks, parametrization_of
from ...rules.rulebook import rules_of
from ..local_sizes.adapted_modules import is_inside
from ..local_sizes.graph_division import without_prototypes
from ..local_sizes.size_origins import record_origins, strip_origins
from .replicated_modules import ReplicatedModules, plan_error

_LIBRARY, _MODELS = "transformers.utils.output_capturing", "transformers.modeling_utils"
_INSTALLED = "_output_capturing_hooks_installed"


_TORCH_ENCODERS = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
_TORCH_TRANSFORMERS = (*_TORCH_ENCODERS, nn.TransformerDecoderLayer, nn.TransformerDecoder, nn.Transformer)
"""Modules of torch that are traced as user code: hooks on the layers inside keep torch off its fast path."""


class ReservedNameError(ScheduleError):
    """Error of a submodule, parameter or buffer whose name ``fx.GraphModule`` uses."""


def trace_flat(schedule: Schedule, replicated: ReplicatedModules) -> fx.GraphModule:
    """Return the flat graph of the module, with the origins of the sizes in it.

    ``replicated`` modules become calls; those with parametrization hooks are added to them. Raises ``ScheduleError`` if hooks
    hide layers or a name is reserved, and ``TraceError`` if the forward cannot be traced.
    """
    layers = [*layer_paths(schedule), *replicated.opaque]
    _check_names(schedule)
    with recorded_captures(schedule.root_module):
        for path, module in schedule.mod.named_modules():
            if path and parametrization_hooks(module):
                if path not in layers:
                    layers.append(path)
                    replicated.opaque[path] = f"its {parametrization_of(module)}"
            elif path and is_opaque(module) and any(is_inside(layer, path) for layer in layers):
                what = f"{path!r} has hooks or a wrapped forward, which hide its layers"
                raise plan_error(schedule, f"{what}; call tensor_parallel first")
        with record_origins(schedule.mod, schedule.world_size), no_parametrization_in_forward() as parametrized:
            traced = flat_graph(schedule, layers)
    strip_origins(traced.graph)
    paths = [path for path, module in schedule.mod.named_modules() if module in parametrized]
    paths = [path for path in paths if not any(is_inside(path, layer) for layer in layers if layer != path)]
    replicated.layers.update(dict.fromkeys(paths, "a forward around it parametrizes its tensors while it runs"))
    return traced


def _check_names(schedule: Schedule) -> None:
    """Refuse a model with a name that ``fx.GraphModule`` uses: its own attribute would be found instead."""
    module = schedule.mod
    for name in (*module._modules, *module._parameters, *module._buffers):
        if name == "meta" or (hasattr(fx.GraphModule, name) and not hasattr(nn.Module, name)):
            what = f"the {type(module).__name__} has a part with the name {name!r}, which every traced module uses itself"
            raise ReservedNameError(f"{what}; rename it, or give plan=", path=schedule.path, primitive="tensor_parallel")


def layer_paths(schedule: Schedule) -> list[str]:
    """Return the paths of the layers, embedding tables and stacked experts that a sharding rule covers."""
    rules, named = rules_of(schedule), schedule.mod.named_modules()
    finds = (rules.is_layer, rules.is_table, rules.stack_cut)
    return [path for path, module in named if path and any(find(module) for find in finds)]


def in_graph(modules: Collection[nn.Module], model: nn.Module, traced: fx.GraphModule) -> set[nn.Module]:
    """Return the modules of a graph at the paths of some of the model: a graph may hold copies."""
    paths = {path for path, module in model.named_modules(remove_duplicate=False) if module in modules}
    return {module for path, module in traced.named_modules(remove_duplicate=False) if path in paths}


def flat_graph(schedule: Schedule, layers: list[str]) -> fx.GraphModule:
    """Return the flat graph of the module in training mode, with the modules at these paths as calls."""
    inputs = schedule.example_inputs
    with _training_mode(schedule.mod), recorded_captures(schedule.root_module):
        traced = trace(
            schedule.root_module,
            flatten=True,
            leaf_modules=layers,
            target=schedule.path,
            example_inputs=inputs,
            symbolic=False,
            open_modules=_TORCH_TRANSFORMERS,
            assigned="returned" if schedule.path else "noted",  # code around a submodule may read the attributes that it sets
        )
    without_prototypes(traced.graph)
    return traced


@contextmanager
def _training_mode(root: nn.Module) -> Iterator[None]:
    """Put every module in training mode for a moment, so that dropouts are in the graph."""
    modes = {module: module.training for module in root.modules()}
    try:
        for module in modes:
            module.training = True
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def recorded_captures(model: nn.Module) -> Iterator[None]:
    """Record in a trace what the hooks append with which Transformers collects hidden states and attentions, and their layers.

    A model installs them on its layers in its first call. They do nothing in a call that does not ask for their output. A
    graph therefore serves calls that ask for the same output.
    """
    pretrained = _outermost_pretrained(model) if {_LIBRARY, _MODELS} <= sys.modules.keys() else []
    before = {module: dict(module._forward_hooks) for module in model.modules()} if pretrained else {}
    marked = {module for module in before if _INSTALLED in vars(module)}
    hooks = list[Any]()
    held = {inner for module in marked for inner in module.modules()}
    try:
        for each in pretrained:
            sys.modules[_LIBRARY].maybe_install_capturing_hooks(each)
        for module in held:  # Transformers installs them again, beside those of the first call
            _remove_hooks(module, before[module])
        found = {hook for module in before for hook in module._forward_hooks.values()}
        # those with the attribute are recorded by an enclosing block
        hooks += [hook for hook in found if getattr(hook, "__module__", "") == _LIBRARY and not hasattr(hook, "traced")]
        for hook in hooks:
            hook.traced = True
        yield
    finally:
        for hook in hooks:
            del hook.traced
        for module, kept in before.items():
            _remove_hooks(module, kept)
            if module not in marked:
                vars(module).pop(_INSTALLED, None)


def _remove_hooks(module: nn.Module, kept: Collection[int]) -> None:
    """Remove the hooks of a module whose keys are not in ``kept``."""
    for key in module._forward_hooks.keys() - kept:
        del module._forward_hooks[key]


def _outermost_pretrained(model: nn.Module) -> list[nn.Module]:
    """Return the Transformers models that no other one contains."""
    if isinstance(model, sys.modules[_MODELS].PreTrainedModel):
        return [model]
    return [each for child in model.children() for each in _outermost_pretrained(child)]
