"""The record of a schedule: every step, with its arguments and who provided it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..reporting.errors import ScheduleError
from .serialization import encode, to_source
from .transaction import Transaction

_OF_THIS_RANK = r"( at)? 0x[0-9a-f]+|(?<=cuda):\d+"


@dataclass(frozen=True)
class Step:
    """One call of a primitive.

    Args:
        path: Dotted path of the module; ``""`` is the top module.
        name: The primitive.
        args: Positional arguments as the user gave them.
        kwargs: Keyword arguments as the user gave them.
        provider: Distribution and version that provided the primitive.
        children: Steps this one took itself; replaying it takes them again.
    """

    path: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    provider: str = ""
    children: tuple[Step, ...] = ()

    def __str__(self) -> str:
        words = [to_source(encode(value, strict=False)) for value in self.args]
        words += [f"{key}={to_source(encode(value, strict=False))}" for key, value in self.kwargs.items()]
        target = f"sch[{self.path!r}]" if self.path else "sch"
        return f"{target}.{self.name}({', '.join(words)})"

    def lines(self, indent: str = "") -> list[str]:
        """The call, and as comments, indented, those it made itself."""
        return [f"{indent}{self}", *(line for step in self.children for line in step.lines(f"{indent or '#'}   "))]


class Journal:
    """The steps of a schedule in order. Printing it gives the Python that takes them; steps inside a step are comments."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._inverses: list[Callable[[], None] | None] = []  # of the steps since the last seal; None begins those of each

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, oldest first."""
        return tuple(self._steps)

    def comparable_lines(self) -> list[str]:
        """Return the steps without what differs between ranks that take the same ones: addresses, and the GPU's number."""
        return [f"step {number}, {re.sub(_OF_THIS_RANK, '', str(step))}," for number, step in enumerate(self, 1)]

    def record(self, step: Step, transaction: Transaction) -> None:
        """Append a step with what undoes it."""
        self._steps.append(step)
        self._inverses += [None, *transaction.settled()]

    def undo(self) -> Step:
        """Take the last step back and return it.

        Raises:
            ScheduleError: there is no step, or the schedule has been built since.
        """
        if not self._inverses:
            raise ScheduleError("nothing to undo" if not self._steps else "no step to undo since the schedule was built")
        while (inverse := self._inverses.pop()) is not None:
            inverse()
        return self._steps.pop()

    def seal(self) -> None:
        """Forget how to undo the steps so far, which frees the parameters they replaced."""
        self._inverses.clear()

    def sealed_copy(self) -> Journal:
        """The same steps, with nothing to undo."""
        copied = Journal()
        copied._steps = self._steps.copy()
        return copied

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return "\n".join(line for step in self._steps for line in step.lines())
