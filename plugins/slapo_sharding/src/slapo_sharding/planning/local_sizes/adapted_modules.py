"""Modules whose forwards use whole sizes of sharded values, or combine whole values with sharded ones."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from slapo_tracing.tracers import is_container

from ...splitting.module_paths import ancestors
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import has_gradient
from ..sequence.module_boundaries import boundary
from ..sequence.sequence_layouts import SEQUENCE


class SharedParameterError(ValueError):
    """Error of a parameter that enters a module running from a graph, meets the outputs of ``layers`` and is used elsewhere."""

    def __init__(self, message: str, layers: Collection[str]) -> None:
        super().__init__(message)
        self.layers = layers


def adapted_modules(layouts: Layouts) -> dict[str, bool]:
    """Return the innermost modules with whole inputs and outputs around all operations that have to be adapted.

    Returns:
        Paths, to whether the module must run from a graph because it cuts whole values or reduces their gradients.
    """
    found: dict[str, bool] = {}
    divided = _divided_modules(layouts)
    for node in layouts.graph.nodes:
        must = any(node in adapted for adapted in _adaptations(layouts))
        must = must or any(other.op == "get_attr" and other in layouts.weights for other in node.all_input_nodes)
        if must or layouts.sizes_to_divide.get(node):
            path = _enclosing_module(layouts, node.meta.get("module", ""), divided)
            found[path] = found.get(path, False) or must
    outer = [path for path in found if not any(is_inside(path, other) for other in found if other != path)]
    return {path: any(must for other, must in found.items() if is_inside(other, path)) for path in outer}


def _adaptations(layouts: Layouts) -> tuple[Collection[fx.Node], ...]:
    sent = layouts.reduced_gradients, layouts.reductions, layouts.first_rank_values, layouts.norms
    return layouts.cut_arguments, *sent, layouts.joint_branches


def communicates(layouts: Layouts, path: str) -> bool:
    """Return whether a module that runs from a graph reduces values there, or uses results of whole layers on shards."""
    inside = any(is_inside(name, path) for name in layouts.shared)
    return inside or any(_runs_inside(node, path) for node in (*layouts.reductions, *layouts.norms, *layouts.first_rank_values))


def modules_that_cut_for(layouts: Layouts, path: str) -> set[str]:
    """Return the modules whose cuts of whole values require the module at ``path`` to run from a graph.

    For the model itself, only modules that no inner module encloses are returned.
    """
    modules = {node.meta.get("module", "") for found in _adaptations(layouts) for node in found}
    if path:
        return {module for module in modules if is_inside(module, path)}
    divided = _divided_modules(layouts)
    return {module for module in modules if not _enclosing_module(layouts, module, divided)}


def partial_parameters(layouts: Layouts, paths: Collection[str]) -> set[str]:
    """Return the names of whole parameters with partial gradients that no module in ``paths``, run from a graph, reduces.

    Raises:
        SharedParameterError: a whole input of such a module comes from a parameter that is used elsewhere on shards too.
    """
    summed, own = set[str](), []
    for node, other, names in layouts.partial_uses:
        owner = next((path for path in paths if _runs_inside(node, path)), None)
        if owner is not None and other is not None and _comes_from_outside(other, owner):
            summed |= {*names}
        else:
            own.append((node, names))
    for node, names in own:
        if both := summed & {*names}:
            place = f"in {node.meta.get('module')!r} and by a module that runs from a graph"
            what = f"{min(both)!r} is used on sharded values {place}"
            raise SharedParameterError(what, layouts.sources.get(node, frozenset()))
    return layouts.partial_parameters.keys() - summed


def num_reduced_gradients(layouts: Layouts, path: str) -> int:
    """Return the number of whole values whose gradients a module that runs from a graph reduces."""
    own = sum(len(values) for node, values in layouts.reduced_gradients.items() if _runs_inside(node, path))
    given = [other for node, other, _ in layouts.partial_uses if other is not None and _runs_inside(node, path)]
    return own + sum(_comes_from_outside(other, path) for other in given)


def cuts_from_outside(layouts: Layouts, path: str) -> bool:
    """Return whether a module cuts its inputs, and these are computed from parameters outside."""
    used = (other for node, other, _ in layouts.partial_uses if other is not None and _runs_inside(node, path))
    return any(_comes_from_outside(other, path) for other in used)


def _comes_from_outside(node: fx.Node, path: str) -> bool:
    if node.op == "get_attr":  # its node lies in the module that uses it first
        return not is_inside(str(node.target).rpartition(".")[0], path)
    if not is_inside(node.meta.get("module", ""), path):
        return True
    return any(_comes_from_outside(other, path) for other in node.all_input_nodes if has_gradient(other))


def is_inside(path: str, other: str) -> bool:
    """Return whether a path is another one or lies below it; the empty path contains all."""
    return not other or path == other or path.startswith(f"{other}.")


def _enclosing_module(layouts: Layouts, path: str, divided: Collection[str]) -> str:
    while path and (path in divided or is_container(layouts.traced.get_submodule(path))):
        path = path.rpartition(".")[0]
    return path


def _divided_modules(layouts: Layouts) -> set[str]:
    """Return the paths of the modules that a sharded value enters or leaves.

    A layer inside may split its output along the sequence. That does not count unless the module has sizes of the sequence.
    """
    sized = {path for each in layouts.sizes_to_divide if _is_split(layouts, each) for path in _modules_around(each)}
    found = set[str]()
    for node in layouts.graph.nodes:
        inside = _modules_around(node)
        for other in node.all_input_nodes:
            if other in layouts.sources:
                origin = {*ancestors(str(other.target))} if other.op == "get_attr" else _modules_around(other)
                left = origin - inside
                found |= inside - origin
                found |= left & sized if layouts.sources[other] == {SEQUENCE} else left
    return found


def _is_split(layouts: Layouts, node: fx.Node) -> bool:
    return SEQUENCE in layouts.sources.get(node, ())


def _modules_around(node: fx.Node) -> set[str]:
    """Return the paths of the modules that a node runs inside."""
    if not node.op.startswith("call"):
        return set()
    path = node.meta.get("module", "")
    found = {path, *ancestors(path)}
    return found - {str(node.args[1])} if node.target is boundary else found  # the sync is outside of the module


def _runs_inside(node: fx.Node, path: str) -> bool:
    if node.target is boundary and node.args[1] == path:
        return False  # the sync is outside of the module
    return node.op.startswith("call") and is_inside(node.meta.get("module", ""), path)
