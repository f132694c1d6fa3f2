"""Whole parameters that are used on sharded and on whole values: one reduction cannot make their gradient right."""

from __future__ import annotations

from collections.abc import Iterator

from ..dry_run.layouts import Layouts
from ..dry_run.node_values import has_any_gradient, has_gradient, parameters_of


def mixed_parameters(layouts: Layouts) -> set[str]:
    """Return the names, with tied ones, of parameters whose gradient is partial in one use and whole in another."""
    held = layouts.traced.named_parameters(remove_duplicate=False)
    named = {name: id(each) for name, each in held if name not in layouts.parameters}
    partial = {named[name] for name in layouts.partial_parameters if name in named}
    whole = {named[name] for name in _parameters_used_whole(layouts) if name in named} if partial else set()
    return {name for name, key in named.items() if key in partial & whole}


def _parameters_used_whole(layouts: Layouts) -> Iterator[str]:
    """Yield the names of parameters in uses whose gradient is whole on every rank."""
    partial = {(node, other) for node, other, _ in layouts.partial_uses}
    for node in layouts.graph.nodes:
        if node.op == "call_module" and str(node.target) not in layouts.splits and (node, None) not in partial:
            module = layouts.traced.get_submodule(str(node.target))
            yield from (f"{node.target}.{name}" for name, each in module.named_parameters() if each.requires_grad)
        if node.op == "output" or (has_any_gradient(node) and not parameters_of(node)):
            for other in node.all_input_nodes:
                if has_gradient(other) and (node, other) not in partial and other not in layouts.weights:
                    yield from parameters_of(other)
