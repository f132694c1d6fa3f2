"""Modules that count heads or widths in attributes of their own: which of these have to count this rank's part only.

The dry run says which sizes in a module's forward are too large for one rank. The attributes they may come from are tried, but
for those that would not make these sizes the right ones, until the graph of this rank's model is, operation by operation, what
the dry run says it has to be.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple

from torch import fx, nn

from slapo_tracing.nodes import expect, is_mode_node, rebuild, set_state

from ..dry_run.layouts import Layouts
from ..dry_run.size_arguments import leaves
from .adapted_modules import is_inside
from .size_origins import AttributeKey, can_become, integer_attributes

_MAX_ATTRIBUTES = 4  # attributes that turn local together


class Difference(NamedTuple):
    """Difference of a rank's model from the one meant.

    Args:
        reason: One sentence.
        module: Path of the module in whose forward it is.
    """

    reason: str
    module: str


@dataclass(frozen=True)
class SizeAttribute:
    """An attribute that may count something that is split.

    Args:
        module: Whose forward reads it.
        name: Of the attribute, of the module itself or of its ``config``.
        value: What it is in the unmodified model.
        place: Where it is in the unmodified model.
        in_config: Whether it is the config's; the module then gets a config of its own.
    """

    module: nn.Module
    name: str
    value: int
    place: AttributeKey
    in_config: bool = False

    @property
    def is_local(self) -> bool:
        """Return whether it counts one rank's part by now."""
        return bool(vars(self.module.config if self.in_config else self.module)[self.name] != self.value)

    def set(self, value: int) -> None:
        """Let the attribute be ``value``, for this module alone."""
        if not self.in_config:
            setattr(self.module, self.name, value)
            return
        config = copy.copy(self.module.config)
        vars(config)[self.name] = value
        self.module.config = config


def candidate_attributes(layouts: Layouts, root: nn.Module, size: int) -> list[SizeAttribute]:
    """The attributes that a size which has to be divided may come from; the likelier ones first."""
    found: dict[tuple[int, AttributeKey], SizeAttribute] = {}
    for node, sizes in layouts.sizes_to_divide.items():
        module = root.get_submodule(node.meta["module"])
        for holder, name, value in integer_attributes(module):
            if value > 1 and value % size == 0 and any(whole % value == 0 for whole in sizes):
                place = id(holder), name
                found[id(module), place] = SizeAttribute(module, name, value, place, holder is not module)
    return sorted(found.values(), key=lambda count: count.in_config)


def make_attributes_local(
    layouts: Layouts, found: list[SizeAttribute], size: int, problem: Callable[[], Difference | None]
) -> Difference | None:
    """Let as few of the attributes as will do count one rank's part; None, or what is wrong with the unmodified ones.

    Args:
        layouts: The dry run.
        found: What ``candidate_attributes`` gave.
        size: Number of ranks.
        problem: Traces this rank's model and says what is wrong with it.
    """
    first = problem()
    if first is None:
        return None
    for local in _choices([count for count in found if not count.is_local]):
        if not _can_explain(layouts, {count.place: count.value // size for count in local}, size):
            continue
        for count in local:
            count.set(count.value // size)
        if problem() is None:
            return None
        for count in local:
            count.set(count.value)
    return first


def _choices(found: list[SizeAttribute]) -> Iterator[list[SizeAttribute]]:
    """Give attributes that may turn local together, the fewest first: those of one name do in all modules."""
    names = list(dict.fromkeys((count.name, count.in_config) for count in found))
    for chosen in chain.from_iterable(combinations(names, number) for number in range(1, _MAX_ATTRIBUTES + 1)):
        yield [count for count in found if (count.name, count.in_config) in chosen]


def _can_explain(layouts: Layouts, values: Mapping[AttributeKey, int], size: int) -> bool:
    """Return False where a size that has to be divided is known not to come from these attributes; a trace costs more."""
    return all(
        can_become(node, whole, whole // size, values) for node, sizes in layouts.sizes_to_divide.items() for whole in sizes
    )


def difference(layouts: Layouts, local: fx.GraphModule, apart: Collection[str] = ()) -> Difference | None:
    """Return where the graph of one rank's model is not what the dry run says; None where it is.

    Args:
        layouts: The dry run.
        local: The model's flat graph on this rank.
        apart: Paths of modules that are one call in it.
    """
    ours, theirs = ([node for node in graph.nodes if _is_call(node)] for graph in (layouts.graph, local.graph))
    theirs = [node for node in theirs if not _is_part_of_call(node, apart)]
    ours = [node for node in ours if not any(is_inside(node.meta.get("module", ""), path) for path in apart)]
    for whole, part in zip(ours, theirs, strict=False):
        if (whole.op, str(whole.target)) != (part.op, str(part.target)):
            return _difference_at(whole, f"{part.target} runs where the unmodified model runs {whole.target}")
        if (mode := part.meta.get("regions", ())) != (meant := whole.meta.get("regions", ())):
            return _difference_at(
                whole, f"{whole.name} runs with {mode or 'no mode'} instead of {meant or 'none'} of gradients and autocast"
            )
        if whole.target is expect:
            continue  # of a value that is compared itself
        expected, given = literals(whole.args, whole.kwargs), literals(part.args, part.kwargs)
        if whole in layouts.local_arguments:
            expected = literals(layouts.local_arguments[whole])
        if (whole not in layouts.sizes_to_divide or whole in layouts.local_arguments) and expected != given:
            return _difference_at(whole, f"{whole.name} is given {given} instead of {expected}")
        value, found = whole.meta.get("val"), part.meta.get("val")
        if value is None:
            continue
        local_shape = layouts.local_shapes.get(whole, tuple(value.shape))
        if found is None or tuple(found.shape) != local_shape:
            shape = None if found is None else list(found.shape)
            return _difference_at(whole, f"{whole.name} has shape {shape} instead of {list(local_shape)}")
    if len(ours) == len(theirs):
        return None
    return Difference(f"the forward takes {len(theirs)} steps instead of {len(ours)}", "")


def _is_call(node: fx.Node) -> bool:
    """Return whether a node calls something, and does not only change a mode, which each node has with it."""
    return node.op.startswith("call") and not is_mode_node(node)


def _difference_at(node: fx.Node, reason: str) -> Difference:
    return Difference(f"{reason} ({node.meta.get('source')})", node.meta.get("module", ""))


def _is_part_of_call(node: fx.Node, apart: Collection[str]) -> bool:
    """Return whether a node calls one of these modules, or makes an object for the call, as a cache of keys.

    What takes something out of the result, or notes something in it, belongs to the call, too.
    """
    if node.target is rebuild:
        return any(user.op == "call_module" and str(user.target) in apart for user in node.users)
    while node.target in (operator.getitem, set_state) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "call_module" and str(node.target) in apart


def literals(*given: object) -> list[object]:
    """The numbers and words a node is given: a count that turned local must not scale a value."""
    return [leaf for leaf in leaves(given) if isinstance(leaf, (bool, int, float, str))]
