"""The module of one stage: its nodes of the flat graph, on its subtree of the model's modules; and the tied parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from slapo_core import TieGroup, TraceError
from slapo_tracing.graphs import TracedModule, guard_of
from slapo_tracing.nodes import ModeState, autocast_state, difference, fingerprint, write_mode_nodes
from slapo_tracing.recording import Attributes

from ..assignment.node_assignment import Assignment


@dataclass
class StageGuard:
    """Inputs, mode and attributes that a stage was traced for.

    Args:
        received: Name, shape and dtype of the values that it receives, in order.
        device: Device of the tensors; the stage runs on the device of its inputs.
        attributes: Attributes that the forward read from inlined modules.
    """

    index: int
    received: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    batch: dict[str, Any]
    training: bool
    autocast: ModeState
    device: torch.device | None
    attributes: Attributes | None

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the graph's inputs; raise ``TraceError`` if the call is not one the stage was made for."""
        again = f"stage {self.index} was made for other inputs; plan the program again:"
        if module.training != self.training:
            raise TraceError(f"{again} it was traced in {'train' if self.training else 'eval'} mode")
        if (autocast := autocast_state()) != self.autocast:
            raise TraceError(f"{again} it runs under autocast {autocast}, traced under {self.autocast or 'none'}")
        if self.attributes is not None:
            self.attributes.check(module)
        names = [name for name, *_ in self.received]
        found = [(tuple(value.shape), value.dtype) for value in args]
        if found != [(shape, dtype) for _, shape, dtype in self.received]:
            raise TraceError(f"{again} it receives {found}, traced as {self.received}")
        for name, traced in self.batch.items():
            given = fingerprint(kwargs.get(name))
            if given != traced:
                raise TraceError(f"{again} {difference(traced, given, name)}")
        return {**dict(zip(names, args, strict=True)), **{name: kwargs[name] for name in self.batch}}


def stage_module(
    flat: TracedModule, root: nn.Module, assignment: Assignment, index: int, keep: set[str], inputs: Mapping[str, Any]
) -> TracedModule:
    """Return the module of stage ``index``, which holds the modules, parameters and buffers of the paths ``keep``."""
    names = _unique_names(assignment.received[index], batch_argument_names(assignment.nodes[index]))
    graph, batch = stage_graph(assignment, index, names)
    traced = guard_of(flat)
    assert traced is not None
    values = [node.meta["val"] for node in assignment.received[index]]
    received = tuple((name, tuple(value.shape), value.dtype) for name, value in zip(names, values, strict=True))
    given = {name: fingerprint(inputs[name]) for name in batch}
    guard = StageGuard(index, received, given, flat.training, autocast_state(), traced.device, traced.attributes)
    targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    constants = {name: getattr(flat, name) for name in targets if "." not in name and not hasattr(root, name)}
    return TracedModule(prune_tree(root, keep), graph, guard, constants)


def _unique_names(received: Sequence[fx.Node], batch: Sequence[str]) -> list[str]:
    """Return a name for each received value: the node's, or a longer one if an argument of the model has that name."""
    names: list[str] = []
    for node in received:
        name = node.name
        while name in batch or name in names:
            name += "_received"
        names.append(name)
    return names


def stage_graph(assignment: Assignment, index: int, names: Sequence[str]) -> tuple[fx.Graph, list[str]]:
    """Return the stage's graph, with these names for the received values, and the model's arguments that it reads."""
    graph, env = fx.Graph(), {}
    nodes = assignment.nodes[index]
    for node, name in zip(assignment.received[index], names, strict=True):
        env[node] = graph.placeholder(name)
        env[node].meta = dict(node.meta)
    batch = [node for node in nodes if node.op == "placeholder"]
    for node in batch:
        env[node] = graph.node_copy(node)
    changed = assignment.aliases.memory_mutated_by(nodes)
    for node in assignment.received[index]:
        value = node.meta["val"]
        if not value.is_contiguous():
            env[node] = graph.call_function(with_strides, (env[node], tuple(value.stride())))
        elif assignment.aliases.memory_of(node) & changed:
            # the runtime owns the received tensor, and autograd forbids changing a leaf
            env[node] = graph.call_method("clone", (env[node],))
    for node in nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, lambda other: env[other])
    if index + 1 < len(assignment.nodes):
        graph.output(tuple(env[node] for node in assignment.received[index + 1]))
    write_mode_nodes(graph)
    return graph, [str(node.target) for node in batch]


def with_strides(received: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Copy a received tensor, which is contiguous, to the strides it has in the model: views depend on them."""
    once = received[tuple(slice(None) if step else slice(1) for step in stride)]
    copied = received.new_empty_strided(once.shape, stride).copy_(once)
    return copied.expand(received.shape)


def batch_argument_names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(str(node.target) for node in nodes if node.op == "placeholder")


_TABLES = ("_parameters", "_buffers", "_modules")


def prune_tree(module: nn.Module, keep: set[str], path: str = "") -> nn.Module:
    """Return a copy of the module tree at ``path`` with only the members whose paths from the top are in ``keep``.

    These are not copied; the modules above them are.
    """
    prefix = f"{path}." if path else ""
    is_list = isinstance(module, (nn.ParameterList, nn.ParameterDict))
    is_part = any(prefix + name not in keep for name in module._parameters)
    copied = object.__new__(nn.Module if is_list and is_part else type(module))  # the class of a list expects all its keys
    copied.__dict__.update(module.__dict__)
    for table in _TABLES[:2]:
        copied.__dict__[table] = {name: value for name, value in module.__dict__[table].items() if prefix + name in keep}
    copied.__dict__["_modules"] = children = {}
    for name, child in module._modules.items():
        if prefix + name in keep:
            children[name] = child
        elif child is not None and any(kept.startswith(f"{prefix}{name}.") for kept in keep):
            children[name] = prune_tree(child, keep, prefix + name)
    return copied


def assign_modules(root: nn.Module, used: Sequence[set[str]]) -> list[set[str]]:
    """Return the paths that each stage holds, for ``prune_tree``: members that it uses, and unused ones that follow these.

    Together they cover the model.

    Args:
        used: Per stage the paths of the modules, parameters and buffers that it calls or reads.
    """
    divided = [set(paths) for paths in used]
    parents = {".".join(path.split(".")[:depth]) for paths in used for path in paths for depth in range(path.count(".") + 1)}
    current = 0
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        nonlocal current
        for table in _TABLES:
            for name, value in module.__dict__[table].items():
                path = prefix + name
                users = [index for index, paths in enumerate(used) if path in paths]
                if users:
                    current = users[-1]
                elif value is not None and id(value) not in seen:
                    if table == "_modules" and path in parents:
                        visit(value, f"{path}.")
                    else:
                        divided[current].add(path)
                if value is not None:
                    seen.add(id(value))

    visit(root, "")
    return divided


def analyze_tie_weights(top_mod: nn.Module, is_pipeline_partitioned: bool) -> dict[nn.Parameter, set[tuple[str, int]]]:
    """Find the parameters that are registered under several names, in time linear in the size of the model.

    Args:
        top_mod: The model; when partitioned, a module whose children are the stages, in order.
        is_pipeline_partitioned: Whether the model is partitioned. If not, every stage number is 0.

    Returns:
        Tied parameter to the set of its ``(name, stage)``, with the name inside the stage. For a partitioned model, only
        parameters that several stages hold.
    """
    stages = list(top_mod.children()) if is_pipeline_partitioned else [top_mod]
    first: dict[int, tuple[str, int]] = {}
    tied: dict[nn.Parameter, set[tuple[str, int]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            place = first.setdefault(id(parameter), (name, index))
            if place != (name, index):
                tied.setdefault(parameter, {place}).add((name, index))
    if not is_pipeline_partitioned:
        return tied
    return {parameter: places for parameter, places in tied.items() if len({index for _, index in places}) > 1}


def tie_groups(module: nn.Module, stages: Sequence[nn.Module]) -> tuple[TieGroup, ...]:
    """Return the parameters of ``module`` that more than one of its ``stages`` holds, in the order of the model."""
    users: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            users[id(parameter)].append(index)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(TieGroup(tuple(names[key]), tuple(users[key])) for key in names if len(users[key]) > 1)
