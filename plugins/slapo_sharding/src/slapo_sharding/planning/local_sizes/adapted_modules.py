"""Modules whose forwards count whole sizes of values that are sharded, or use whole values on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from slapo_tracing.tracers import is_container

from ..dry_run.layouts import Layouts
from ..dry_run.node_values import has_gradient
from ..sequence.module_boundaries import boundary
from ..sequence.sequence_layouts import SEQUENCE


class SharedParameterError(ValueError):
    """Error of a parameter that a module which runs from a graph is given, and that is used in another way, too.

    Args:
        message: One sentence.
        layers: The layers whose sharded outputs meet it.
    """

    def __init__(self, message: str, layers: Collection[str]) -> None:
        super().__init__(message)
        self.layers = layers


def adapted_modules(layouts: Layouts) -> dict[str, bool]:
    """Return the paths of the innermost modules, with whole inputs and results, around all operations that have to be adapted.

    Args:
        layouts: The dry run of the whole model's flat graph.

    Returns:
        Paths to whether the module cannot run but from a graph, as it cuts whole values or sums their gradients.
    """
    found: dict[str, bool] = {}
    for node in layouts.graph.nodes:
        must = any(node in found for found in _adaptations(layouts))
        must = must or any(other.op == "get_attr" and other in layouts.weights for other in node.all_input_nodes)
        if must or layouts.sizes_to_divide.get(node):
            path = _enclosing_module(layouts, node.meta.get("module", ""))
            found[path] = found.get(path, False) or must
    outer = [path for path in found if not any(is_inside(path, other) for other in found if other != path)]
    return {path: any(must for other, must in found.items() if is_inside(other, path)) for path in outer}


def _adaptations(layouts: Layouts) -> tuple[Collection[fx.Node], ...]:
    return (
        layouts.cut_arguments,
        layouts.reduced_gradients,
        layouts.reductions,
        layouts.first_rank_values,
        layouts.norms,
        layouts.joint_branches,
    )


def communicates(layouts: Layouts, path: str) -> bool:
    """Return whether a module that runs from a graph adds up values there, or uses whole layers' results on parts."""
    inside = any(is_inside(name, path) for name in layouts.shared)
    return inside or any(_runs_inside(node, path) for node in (*layouts.reductions, *layouts.norms, *layouts.first_rank_values))


def modules_that_cut_for(layouts: Layouts, path: str) -> set[str]:
    """Return the modules in whose forwards whole values are cut so that the module at a path has to run from a graph.

    Args:
        layouts: The dry run of the whole model's flat graph.
        path: One of ``adapted_modules``. Of the model itself only those are meant that no module below can take care of.
    """
    modules = {node.meta.get("module", "") for found in _adaptations(layouts) for node in found}
    return {module for module in modules if (is_inside(module, path) if path else not _enclosing_module(layouts, module))}


def partial_parameters(layouts: Layouts, paths: Collection[str]) -> set[str]:
    """Return the names of whole parameters of whose gradient each rank has a part.

    Args:
        layouts: The dry run of the whole model's flat graph.
        paths: Modules that run from graphs, which sum the gradients of whole values that they are given.

    Raises:
        SharedParameter: a parameter is used in such a module as a value that another one computes from it, and elsewhere.
    """
    summed, own = set[str](), set(layouts.partial_parameters)
    for node, other, names in layouts.partial_uses:
        owner = next((path for path in paths if _runs_inside(node, path)), None)
        if owner is not None and other is not None and _comes_from_outside(other, owner):
            summed |= {*names}
    for node, other, names in layouts.partial_uses:
        owner = next((path for path in paths if _runs_inside(node, path)), None)
        is_own = owner is None or other is None or not _comes_from_outside(other, owner)
        if is_own and (both := summed & {*names}):
            what = f"{min(both)!r} is used on sharded values in {node.meta.get('module')!r} and in another way"
            raise SharedParameterError(what, layouts.sources.get(node, frozenset()))
    return own - summed


def num_reduced_gradients(layouts: Layouts, path: str) -> int:
    """Return how many gradients of whole values a module that runs from a graph has to sum."""
    own = sum(len(values) for node, values in layouts.reduced_gradients.items() if _runs_inside(node, path))
    given = [other for node, other, _ in layouts.partial_uses if other is not None and _runs_inside(node, path)]
    return own + sum(_comes_from_outside(other, path) for other in given)


def cuts_from_outside(layouts: Layouts, path: str) -> bool:
    """Return whether a module cuts values that it is given, and that are made from parameters elsewhere."""
    return any(
        other is not None and _runs_inside(node, path) and _comes_from_outside(other, path)
        for node, other, _ in layouts.partial_uses
    )


def _comes_from_outside(node: fx.Node, path: str) -> bool:
    if node.op == "get_attr":  # its node is where it is used first
        return not is_inside(str(node.target).rpartition(".")[0], path)
    if not is_inside(node.meta.get("module", ""), path):
        return True
    return any(_comes_from_outside(other, path) for other in node.all_input_nodes if has_gradient(other))


def is_inside(path: str, other: str) -> bool:
    """Return whether a module is another one or below it."""
    return not other or path == other or path.startswith(f"{other}.")


def _enclosing_module(layouts: Layouts, path: str) -> str:
    while path and (is_container(layouts.traced.get_submodule(path)) or any(True for _ in _sharded_at_boundary(layouts, path))):
        path = path.rpartition(".")[0]
    return path


def _sharded_at_boundary(layouts: Layouts, path: str) -> Iterator[fx.Node]:
    """Give sharded values that go into a module, or come out of it.

    A layer inside may split its result along the sequence: that is nothing to the graph around, where it gives no sizes to it.
    """
    for node in layouts.graph.nodes:
        inside = _runs_inside(node, path)
        for other in node.all_input_nodes:
            is_own = other.op == "get_attr" and is_inside(str(other.target).rpartition(".")[0], path)
            if (is_own or _runs_inside(other, path)) != inside and other in layouts.sources:
                is_result = not inside and layouts.sources[other] == {SEQUENCE}
                if not is_result or _sizes_sequence(layouts, path):
                    yield other


def _sizes_sequence(layouts: Layouts, path: str) -> bool:
    return any(_runs_inside(node, path) and SEQUENCE in layouts.sources.get(node, ()) for node in layouts.sizes_to_divide)


def _runs_inside(node: fx.Node, path: str) -> bool:
    if node.target is boundary and node.args[1] == path:
        return False  # a sync stands around the module
    return node.op.startswith("call") and is_inside(node.meta.get("module", ""), path)
