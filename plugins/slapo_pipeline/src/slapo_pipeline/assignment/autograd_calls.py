"""Check of ``torch.autograd.grad`` inside a forward: the autograd graph of a stage ends at the values the stage receives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

import torch
from torch import fx, nn

from slapo_core import TraceError

from .alias_analysis import AliasAnalysis, mutated_values, with_sources


def check_autograd_calls(
    order: Sequence[fx.Node],
    stages: Mapping[fx.Node, Set[int]],
    received: Sequence[Set[fx.Node]],
    aliases: AliasAnalysis,
    root: nn.Module,
) -> None:
    """Refuse ``torch.autograd.grad`` if a path from its inputs to its outputs crosses a boundary.

    Autograd would not see that path, and the gradient would lack its share.

    Raises:
        TraceError: there is such a path.
    """
    for node in order:
        if node.target is not torch.autograd.grad:
            continue
        outputs, inputs = (list(_argument(node, place, name)) for place, name in enumerate(("outputs", "inputs")))
        before = with_sources(outputs, lambda node: node.all_input_nodes)
        for source in inputs:
            between = _descendants(source, order, aliases, root)
            for stage in sorted(stages[node]):
                if late := next((value for value in received[stage] if value in between and value in before), None):
                    where = node.meta.get("module") or "the forward"
                    raise TraceError(
                        f"{where}: torch.autograd.grad runs in stage {stage}, but {late.name!r}, between its outputs and "
                        f"{source.name!r}, comes from another stage, where it cannot follow; cut the model where all of "
                        "this is in one stage",
                        source=node.meta.get("source"),
                    )


def _argument(node: fx.Node, place: int, name: str) -> Iterator[fx.Node]:
    value = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return (part for part in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(part, fx.Node))


def _descendants(source: fx.Node, order: Sequence[fx.Node], aliases: AliasAnalysis, root: nn.Module) -> set[fx.Node]:
    """Return the nodes that autograd reaches from ``source``: by inputs, mutated memory, and holders of the parameter."""
    found: set[fx.Node] = set()
    changed: set[int] = set()
    holders = _other_uses_of_parameter(source, order, root)
    for node in order:
        value = node.meta.get("val")
        if node is source or (value is not None and not value.requires_grad):
            continue
        inputs: Collection[fx.Node] = node.all_input_nodes
        if node in holders or any(other is source or other in found or aliases.memory_of(other) & changed for other in inputs):
            found.add(node)
            changed |= {number for other in mutated_values(node) for number in aliases.memory_of(other)}
    return found


def _other_uses_of_parameter(source: fx.Node, order: Sequence[fx.Node], root: nn.Module) -> set[fx.Node]:
    """Return the nodes that use the parameter ``source`` reads, under any of its names, other than ``source``."""
    tensor = dict(root.named_parameters(remove_duplicate=False)).get(str(source.target)) if source.op == "get_attr" else None
    if tensor is None:
        return set()
    names = {name for name, parameter in root.named_parameters(remove_duplicate=False) if parameter is tensor}
    holding = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    uses = {"get_attr": names, "call_module": holding}
    return {node for node in order if str(node.target) in uses.get(node.op, ())} - {source}
