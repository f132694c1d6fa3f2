"""From which attributes of its modules a model computes the sizes in its graph: numbers that remember it.

A graph has the sizes alone, ``64`` where the model wrote ``num_heads * head_dim``. While it is traced, the attributes hold
numbers that say of all that is added to and multiplied with them what it would be if some attributes were others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate

AttributeKey = tuple[int, str]
"""Id of what holds an attribute, a module or a config, and the attribute's name."""

_GIVEN = "sizes given"
_MAX_TERMS = 12  # terms
_OPERATIONS = [f"__{side}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod") for side in ("", "r")]


class SizeWithOrigin(int):
    """A number computed from attributes.

    Args:
        value: The number.
        size: Number of ranks.
        where: What it may be if the attributes at these places had these values, and the others those they have by then: more
            than one number where it was computed with others too, which may be lengths of sharded tensors, or not.
        terms: How many numbers it was computed from; with more than a few it is not asked what it may be.
    """

    size: int
    possible_values: Callable[[Mapping[AttributeKey, int]], set[int]]
    terms: int

    def __new__(
        cls, value: int, size: int, possible_values: Callable[[Mapping[AttributeKey, int]], set[int]], terms: int = 1
    ) -> SizeWithOrigin:
        made = super().__new__(cls, value)
        made.size, made.possible_values, made.terms = size, possible_values, terms
        return made

    def __deepcopy__(self, memo: Any) -> SizeWithOrigin:
        return self  # a model may copy its config while it runs

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _with_origin(operation: Callable[[int, Any], Any]) -> Callable[[SizeWithOrigin, Any], Any]:
    def remembering(self: SizeWithOrigin, other: Any) -> Any:
        value = operation(self, other)
        terms = self.terms + (other.terms if isinstance(other, SizeWithOrigin) else 1)
        if value is NotImplemented:
            return value

        def possible_values(values: Mapping[AttributeKey, int]) -> set[int]:
            found = set()
            for pair in product(self.possible_values(values), _possible_values(other, values, self.size)):
                with suppress(ZeroDivisionError):
                    found.add(operation(*pair))
            return found

        return SizeWithOrigin(value, self.size, possible_values if terms <= _MAX_TERMS else self.possible_values, terms)

    return remembering


def _possible_values(number: int, values: Mapping[AttributeKey, int], size: int) -> set[int]:
    if isinstance(number, SizeWithOrigin):
        return number.possible_values(values)
    return {number} if number % size else {number, number // size}


for _name in _OPERATIONS:
    setattr(SizeWithOrigin, _name, _with_origin(getattr(int, _name)))


def integer_attributes(module: nn.Module) -> Iterator[tuple[Any, str, int]]:
    """Holder, name and value of what a module, or its config, keeps in attributes and may count with."""
    for holder in (module, module.__dict__.get("config")):
        yield from ((holder, name, value) for name, value in getattr(holder, "__dict__", {}).items() if type(value) is int)


@contextmanager
def record_origins(root: nn.Module, size: int) -> Iterator[None]:
    """Let what is computed from attributes remember them."""
    places = {
        (id(holder), name): (holder, value) for module in root.modules() for holder, name, value in integer_attributes(module)
    }
    try:
        for place, (holder, value) in places.items():
            vars(holder)[place[1]] = _attribute(holder, place, value, size)
        yield
    finally:
        for (_, name), (holder, value) in places.items():
            vars(holder)[name] = value


def _attribute(holder: Any, place: AttributeKey, value: int, size: int) -> SizeWithOrigin:
    return SizeWithOrigin(value, size, lambda values: {values.get(place, vars(holder)[place[1]])})


def strip_origins(graph: fx.Graph) -> None:
    """Let the nodes of a graph have plain numbers; ``can_become`` still knows."""
    for node in graph.nodes:
        given: list[int] = []

        def plain(value: Any, given: list[int] = given) -> Any:
            if not isinstance(value, int) or isinstance(value, bool):
                return value
            given.append(value)
            return int(value)

        args, kwargs = map_aggregate(node.args, plain), map_aggregate(node.kwargs, plain)
        if any(isinstance(value, SizeWithOrigin) for value in given):
            node.args, node.kwargs, node.meta[_GIVEN] = args, kwargs, given


def can_become(node: fx.Node, whole: int, part: int, values: Mapping[AttributeKey, int]) -> bool:
    """Whether a size that a node is given may be ``part`` instead of ``whole`` if attributes at some places are others.

    Args:
        node: Of a graph of the unmodified model.
        whole: One of the sizes it is given.
        part: What one of those equal to ``whole`` has to become.
        values: Of the attributes that are to be set; the others stay as they are by now.
    """
    given = [value for value in node.meta.get(_GIVEN, ()) if value == whole]
    if not given or not all(isinstance(value, SizeWithOrigin) and value.terms <= _MAX_TERMS for value in given):
        return True  # nothing is known of where it comes from
    return any(part in value.possible_values(values) for value in given)
