"""Module attributes that count heads or widths, and have to count the local shard only.

The dry run finds the sizes in a forward that are too large for one rank. Subsets of the attributes that these sizes come from
are set to local values. The first subset wins with which the graph of this rank's model equals the dry run, operation by
operation.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple

from torch import fx, nn

from slapo_tracing.nodes import expect, is_mode_node, rebuild, set_state

from ..dry_run.layouts import Layouts
from ..dry_run.size_arguments import leaves
from .adapted_modules import is_inside
from .size_origins import AttributeKey, can_become, integer_attributes

_MAX_ATTRIBUTES = 4  # attribute names set together


class Difference(NamedTuple):
    """Difference between this rank's model and the dry run: a sentence, and the path of the module whose forward differs."""

    reason: str
    module: str


@dataclass(frozen=True)
class SizeAttribute:
    """Attribute that may count something that is split.

    Args:
        module: Module whose forward reads it.
        name: Name in the module or in its ``config``.
        value: Value in the unmodified model.
        key: Its holder and name in the unmodified model.
        in_config: Whether it belongs to the config. The module then gets a config of its own.
    """

    module: nn.Module
    name: str
    value: int
    key: AttributeKey
    in_config: bool = False

    @property
    def is_local(self) -> bool:
        """Return whether the attribute counts the local shard now."""
        return bool(vars(self.module.config if self.in_config else self.module)[self.name] != self.value)

    def set(self, value: int) -> None:
        """Set the attribute for this module alone."""
        if not self.in_config:
            setattr(self.module, self.name, value)
            return
        config = copy.copy(self.module.config)
        vars(config)[self.name] = value
        self.module.config = config


def candidate_attributes(layouts: Layouts, root: nn.Module, size: int) -> list[SizeAttribute]:
    """Return the attributes that a size to divide may come from, those of modules before those of configs."""
    found: dict[tuple[int, AttributeKey], SizeAttribute] = {}
    for node, sizes in layouts.sizes_to_divide.items():
        module = root.get_submodule(node.meta["module"])
        for holder, name, value in integer_attributes(module):
            if value > 1 and value % size == 0 and any(whole % value == 0 for whole in sizes):
                key = id(holder), name
                found[id(module), key] = SizeAttribute(module, name, value, key, holder is not module)
    return sorted(found.values(), key=lambda count: count.in_config)


def make_attributes_local(
    layouts: Layouts, found: list[SizeAttribute], size: int, problem: Callable[[], Difference | None]
) -> Difference | None:
    """Set as few attributes as possible to local values; return None, or the difference with none of them set.

    ``problem`` traces this rank's model and returns its difference from the dry run.
    """
    first = problem()
    if first is None:
        return None
    for local in _choices([count for count in found if not count.is_local]):
        values = {count.key: count.value // size for count in local}
        sizes = ((node, whole) for node, found in layouts.sizes_to_divide.items() for whole in found)
        if not all(can_become(node, whole, whole // size, values) for node, whole in sizes):  # cheaper than a trace
            continue
        for count in local:
            count.set(count.value // size)
        if problem() is None:
            return None
        for count in local:
            count.set(count.value)
    return first


def _choices(found: list[SizeAttribute]) -> Iterator[list[SizeAttribute]]:
    """Yield sets of attributes by increasing number of names; attributes of one name are set in all modules."""
    names = list(dict.fromkeys((count.name, count.in_config) for count in found))
    for chosen in chain.from_iterable(combinations(names, number) for number in range(1, _MAX_ATTRIBUTES + 1)):
        yield [count for count in found if (count.name, count.in_config) in chosen]


def difference(layouts: Layouts, local: fx.GraphModule, apart: Collection[str] = ()) -> Difference | None:
    """Return the first difference between the graph of this rank's model and the dry run, or None.

    Args:
        layouts: Dry run.
        local: Flat graph of the model on this rank.
        apart: Paths of modules that are single calls in ``local``.
    """
    # a node that only changes a mode does not count, as every node records its modes
    calls = (
        [node for node in of.nodes if node.op.startswith("call") and not is_mode_node(node)]
        for of in (layouts.graph, local.graph)
    )
    ours, theirs = calls
    theirs = [node for node in theirs if not _is_part_of_call(node, apart)]
    ours = [node for node in ours if not any(is_inside(node.meta.get("module", ""), path) for path in apart)]
    for whole, part in zip(ours, theirs, strict=False):
        if (whole.op, str(whole.target)) != (part.op, str(part.target)):
            return _difference_at(whole, f"{part.target} runs instead of the unmodified model's {whole.target}")
        if (mode := part.meta.get("regions", ())) != (meant := whole.meta.get("regions", ())):
            what = f"{whole.name} runs with the gradient and autocast modes"
            return _difference_at(whole, f"{what} {mode or 'unset'} instead of {meant or 'unset'}")
        if whole.target is expect:
            continue  # the value it guards is compared itself
        expected, given = literals(whole.args, whole.kwargs), literals(part.args, part.kwargs)
        if whole in layouts.local_arguments:
            expected = literals(layouts.local_arguments[whole])
        if (whole not in layouts.sizes_to_divide or whole in layouts.local_arguments) and expected != given:
            return _difference_at(whole, f"{whole.name} has the arguments {given} instead of {expected}")
        value, found = whole.meta.get("val"), part.meta.get("val")
        if value is None:
            continue
        local_shape = layouts.local_shapes.get(whole, tuple(value.shape))
        if found is None or tuple(found.shape) != local_shape:
            shape = None if found is None else list(found.shape)
            return _difference_at(whole, f"{whole.name} has shape {shape} instead of {list(local_shape)}")
    if len(ours) == len(theirs):
        return None
    return Difference(f"the forward has {len(theirs)} operations instead of {len(ours)}", "")


def _difference_at(node: fx.Node, reason: str) -> Difference:
    return Difference(f"{reason} ({node.meta.get('source')})", node.meta.get("module", ""))


def _is_part_of_call(node: fx.Node, apart: Collection[str]) -> bool:
    """Return whether a node belongs to the call of one of these modules.

    That includes the construction of an argument, such as a key cache, and reads from the result or writes to it.
    """
    if node.target is rebuild:
        return any(user.op == "call_module" and str(user.target) in apart for user in node.users)
    while node.target in (operator.getitem, set_state) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "call_module" and str(node.target) in apart


def literals(*given: object) -> list[object]:
    """Return the numbers and strings among arguments: a count that became local must not scale a value."""
    return [leaf for leaf in leaves(given) if isinstance(leaf, (bool, int, float, str))]
