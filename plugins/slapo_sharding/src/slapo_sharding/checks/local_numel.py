"""Numbers of elements of shards, which code outside their modules counts."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

from torch.utils._pytree import tree_map_only

NUMEL_METHODS = frozenset(("numel", "nelement"))


class LocalNumel:
    """Number of elements of a shard, or a sum of such numbers; it can be added and printed, as in a count of parameters.

    Other arithmetic calls ``refuse`` first, because the unmodified model has another number. The class is not an ``int``:
    ``1.0 / count`` would not call a method of an ``int``.
    """

    def __init__(self, number: int, refuse: Callable[[], None]) -> None:
        self.number, self.refuse = number, refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, operator.index, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __int__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return repr(self.number)

    def __format__(self, spec: str) -> str:
        return format(self.number, spec)

    def __eq__(self, other: object) -> bool:
        return self.number == other

    def __hash__(self) -> int:
        return hash(self.number)

    def __bool__(self) -> bool:
        return bool(self.number)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, int | LocalNumel):
            return LocalNumel(self.number + int(other), self.refuse)
        self.refuse()
        return self.number + other

    __radd__ = __add__


def _checked_operation(operation: Callable[..., Any], is_reflected: bool = False) -> Callable[..., Any]:
    def compute(count: LocalNumel, *others: Any) -> Any:
        count.refuse()
        return operation(*others, count.number) if is_reflected else operation(count.number, *others)

    return compute


for _operation in (operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.sub, divmod):
    setattr(LocalNumel, f"__{_operation.__name__}__", _checked_operation(_operation))
    setattr(LocalNumel, f"__r{_operation.__name__}__", _checked_operation(_operation, is_reflected=True))
for _unary_or_comparison in (operator.neg, operator.index, operator.lt, operator.le, operator.gt, operator.ge, float):
    setattr(LocalNumel, f"__{_unary_or_comparison.__name__}__", _checked_operation(_unary_or_comparison))


def is_called_by_slapo() -> bool:
    """Return whether a package of Slapo, not the model, calls the torch function."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(2)) if frame.f_code.co_name != "__torch_function__")
    names = (str(frame.f_globals.get("__name__")) for frame in frames)
    return next(name for name in names if not name.startswith("torch.")).startswith("slapo_")
