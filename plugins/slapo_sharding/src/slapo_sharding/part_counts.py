"""Numbers of elements of a rank's parts, which code outside of their modules counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

COUNTS = frozenset(("numel", "nelement"))


class PartCount(int):
    """Number of elements of a part, or a sum of such numbers: it may be added up and shown, as in a count of what is trained.

    Computing with it calls ``refuse`` first, as the unmodified model has another number.
    """

    refuse: Callable[[], None]

    @classmethod
    def of(cls, number: int, refuse: Callable[[], None]) -> PartCount:
        """Return a number with what is called before it is computed with."""
        made = cls(number)
        made.refuse = refuse
        return made

    def __add__(self, other: int) -> PartCount:
        return PartCount.of(int(self) + int(other), self.refuse)

    __radd__ = __add__


def _refusing(name: str) -> Callable[..., Any]:
    def compute(count: PartCount, *others: Any) -> Any:
        count.refuse()
        return getattr(int, name)(count, *others)

    return compute


for _name in "mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow sub rsub float neg lt le gt ge".split():
    setattr(PartCount, f"__{_name}__", _refusing(f"__{_name}__"))


def asks_slapo() -> bool:
    """Return whether a package of Slapo calls the torch function, and not the model."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(2)) if frame.f_code.co_name != "__torch_function__")
    names = (str(frame.f_globals.get("__name__")) for frame in frames)
    return next(name for name in names if not name.startswith("torch.")).startswith("slapo_")
