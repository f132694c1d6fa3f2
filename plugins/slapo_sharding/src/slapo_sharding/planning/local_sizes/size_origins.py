"""Integers that record the module attributes they were computed from.

A graph has only sizes, such as ``64`` where the model wrote ``num_heads * head_dim``. During tracing, the attributes hold
integers that follow additions, subtractions, multiplications, floor divisions and remainders. Such an integer can tell its
value for other values of the attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate

AttributeKey = tuple[int, str]
"""Id of the module or config that holds an attribute, and the name of the attribute."""

PossibleValues = Callable[[Mapping[AttributeKey, int]], set[int]]
_GIVEN = "sizes given"
_MAX_TERMS = 12  # the possible values are up to 2 ** terms
_OPERATIONS = [f"__{side}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod") for side in ("", "r")]


class SizeWithOrigin(int):
    """Integer computed from attributes.

    Args:
        value: The integer.
        size: Number of ranks.
        possible_values: Returns the values for given values of some attributes; the others keep those they have then. There
            are several if other numbers took part, as these may be sizes of sharded dimensions or not.
        terms: Number of integers it was computed from. Beyond a limit, its possible values are not computed.
    """

    size: int
    possible_values: PossibleValues
    terms: int

    def __new__(cls, value: int, size: int, possible_values: PossibleValues, terms: int = 1) -> SizeWithOrigin:
        made = super().__new__(cls, value)
        made.size, made.possible_values, made.terms = size, possible_values, terms
        return made

    def __deepcopy__(self, memo: Any) -> SizeWithOrigin:
        return self  # a model may copy its config during its forward

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _with_origin(operation: Callable[[int, Any], Any]) -> Callable[[SizeWithOrigin, Any], Any]:
    def operation_with_origin(self: SizeWithOrigin, other: Any) -> Any:
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

    return operation_with_origin


def _possible_values(number: int, values: Mapping[AttributeKey, int], size: int) -> set[int]:
    if isinstance(number, SizeWithOrigin):
        return number.possible_values(values)
    return {number} if number % size else {number, number // size}


for _name in _OPERATIONS:
    setattr(SizeWithOrigin, _name, _with_origin(getattr(int, _name)))


def integer_attributes(module: nn.Module) -> Iterator[tuple[Any, str, int]]:
    """Yield holder, name and value of the integer attributes of a module and its config."""
    for holder in (module, module.__dict__.get("config")):
        yield from ((holder, name, value) for name, value in getattr(holder, "__dict__", {}).items() if type(value) is int)


@contextmanager
def record_origins(root: nn.Module, size: int) -> Iterator[None]:
    """Record which attributes the integers computed inside come from."""
    found = (each for module in root.modules() for each in integer_attributes(module))
    keys = {(id(holder), name): (holder, value) for holder, name, value in found}
    try:
        for key, (holder, value) in keys.items():
            vars(holder)[key[1]] = _attribute(holder, key, value, size)
        yield
    finally:
        for (_, name), (holder, value) in keys.items():
            vars(holder)[name] = value


def _attribute(holder: Any, key: AttributeKey, value: int, size: int) -> SizeWithOrigin:
    return SizeWithOrigin(value, size, lambda values: {values.get(key, vars(holder)[key[1]])})


def strip_origins(graph: fx.Graph) -> None:
    """Replace the integers in a graph by plain ones; the originals are kept for ``can_become``."""
    for node in graph.nodes:
        given: list[int] = []

        def plain_size(value: Any, given: list[int] = given) -> Any:
            if not isinstance(value, int) or isinstance(value, bool):
                return value
            given.append(value)
            return int(value)

        args, kwargs = map_aggregate(node.args, plain_size), map_aggregate(node.kwargs, plain_size)
        if any(isinstance(value, SizeWithOrigin) for value in given):
            node.args, node.kwargs, node.meta[_GIVEN] = args, kwargs, given


def can_become(node: fx.Node, whole: int, part: int, values: Mapping[AttributeKey, int]) -> bool:
    """Return whether a size ``whole`` among a node's arguments becomes ``part`` for these values of some attributes."""
    given = [value for value in node.meta.get(_GIVEN, ()) if value == whole]
    if not given or not all(isinstance(value, SizeWithOrigin) and value.terms <= _MAX_TERMS for value in given):
        return True  # its origin is not known
    return any(part in value.possible_values(values) for value in given)
