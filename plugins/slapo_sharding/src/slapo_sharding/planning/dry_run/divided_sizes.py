"""Size arguments in a dry run that have another value on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .size_arguments import is_size, leaf_indices_to_divide

if TYPE_CHECKING:
    from .layouts import Layouts


def record_sizes_to_divide(layouts: Layouts, n: fx.Node, value: DTensor, args: Any, kwargs: Any) -> None:
    """Record the size arguments of an operation that would give another shape on one rank."""
    if n in layouts.sizes_to_divide or n in layouts.norms or not any(map(is_size, pytree.tree_leaves((args, kwargs)))):
        return
    local = pytree.tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
    expected = value.to_local().shape
    if _returns_shapes(layouts, n, local, expected):
        return
    given = {int(part) for part in pytree.tree_leaves((args, kwargs)) if is_size(part)}
    pairs = zip(value.shape, expected, strict=True)
    layouts.sizes_to_divide[n] = tuple(whole for whole, part in pairs if whole != part and whole in given)
    record_divided_arguments(layouts, n, local, expected)


def record_divided_arguments(layouts: Layouts, n: fx.Node, given: Any, expected: Any) -> None:
    """Record the indices of the arguments to divide so that an operation returns the expected local shapes."""
    fits = lambda other: _returns_shapes(layouts, n, other, expected)  # noqa: E731
    found = leaf_indices_to_divide(given, layouts.sizes_to_divide[n], layouts.mesh.size(), fits)
    if found is not None:
        layouts.divided_arguments[n] = dict.fromkeys(found, 0)


def _returns_shapes(layouts: Layouts, n: fx.Node, given: Any, expected: Any) -> bool:
    """Return whether a node returns tensors of the expected shapes with other arguments."""
    try:
        value = getattr(layouts, n.op)(n.target, *given)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    shapes = [part.shape for part in value] if isinstance(value, list | tuple) else value.shape
    return bool(shapes == expected)
