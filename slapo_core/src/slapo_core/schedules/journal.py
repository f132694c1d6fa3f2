"""Record of a schedule: every step with its arguments and its provider."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..reporting.errors import ScheduleError, SlapoError
from .serialization import encode, imports_of, to_source
from .transaction import Transaction

FORMAT_VERSION = 1
"""Version of the files that ``Journal.save`` writes."""

_RANK_SPECIFIC = r"( at)? 0x[0-9a-f]+|(?<=cuda):\d+"


@dataclass(frozen=True)
class Step:
    """One call of a primitive.

    Args:
        path: Dotted path of the module; ``""`` is the top module.
        name: Name of the primitive.
        args: Positional arguments, as the user passed them.
        kwargs: Keyword arguments, as the user passed them.
        provider: Distribution and version that provided the primitive.
        children: Steps that this step took itself. A replay of this step takes them again.

    Example:
        >>> print(Step("h.0", "annotate", ("weight",), {"key": "lr_scale", "value": 0.1}))
        sch['h.0'].annotate('weight', key='lr_scale', value=0.1)
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
        """Return the call, followed by the calls of its children as indented comments."""
        return [f"{indent}{self}", *(line for step in self.children for line in step.lines(f"{indent or '#'}   "))]


class Journal:
    """The steps of a schedule in order.

    Printed, it is the Python code that takes the steps; steps within a step are comments.

    Example:
        >>> sch = create_schedule(nn.Sequential(nn.ReLU()))
        >>> sch["0"].replace(nn.Tanh())
        Schedule('0': Tanh)
        >>> print(sch.journal)
        sch['0'].replace(slapo_core.make(torch.nn.modules.activation.Tanh))
        >>> len(sch.journal), sch.undo().name, len(sch.journal)
        (1, 'replace', 0)
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._inverses: list[Callable[[], None] | None] = []  # since the last seal; None precedes the actions of each step

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, oldest first."""
        return tuple(self._steps)

    def comparable_lines(self) -> list[str]:
        """Return the steps as text without rank-specific parts, which are addresses and GPU numbers."""
        return [f"step {number}, {re.sub(_RANK_SPECIFIC, '', str(step))}," for number, step in enumerate(self, 1)]

    def record(self, step: Step, transaction: Transaction) -> None:
        """Append a step and the actions that undo it."""
        self._steps.append(step)
        self._inverses += [None, *transaction.undo_actions()]

    def undo(self) -> Step:
        """Undo the last step and return it.

        Raises:
            ScheduleError: there is no step, or the schedule has been built since.
        """
        if not self._inverses:
            raise ScheduleError("nothing to undo" if not self._steps else "no step to undo since the schedule was built")
        while (inverse := self._inverses.pop()) is not None:
            inverse()
        return self._steps.pop()

    def seal(self) -> None:
        """Drop the undo actions of the steps so far, which frees the parameters that they replaced."""
        self._inverses.clear()

    def sealed_copy(self) -> Journal:
        """Return a copy with the same steps, none of which can be undone."""
        copied = Journal()
        copied._steps = self._steps.copy()
        return copied

    def save(self, path: str | os.PathLike[str], model: str) -> None:
        """Write the steps to ``*.json`` or ``*.py``. The file is replaced atomically.

        Args:
            path: The file.
            model: Class name of the unmodified model.

        Raises:
            ScheduleError: other suffix, no such folder, or an argument of a step has no written form.
        """
        target, written = Path(path), []
        writers: dict[str, Callable[[list[Any], str], str]] = {".json": self._as_json, ".py": self._as_python}
        if target.suffix not in writers:
            raise ScheduleError(f"cannot tell the format of {target.name!r}; end it in .json or .py", primitive="save")
        for number, step in enumerate(self, 1):
            with error_prefix(f"step {number}, {step}"):
                kwargs = {key: encode(value) for key, value in step.kwargs.items()}
                written.append({"args": encode(list(step.args)), "kwargs": kwargs})
        text = writers[target.suffix](written, model)
        if not target.parent.is_dir():
            raise ScheduleError(f"no folder {str(target.parent)!r} to save {target.name!r} in", primitive="save")
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=target.name, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, target)

    def _as_json(self, written: list[Any], model: str) -> str:
        pairs = zip(self, written, strict=True)
        steps = [{"path": it.path, "name": it.name, **own, "provider": it.provider} for it, own in pairs]
        return json.dumps({"slapo_schedule": FORMAT_VERSION, "model": model, "steps": steps}, indent=1) + "\n"

    def _as_python(self, written: list[Any], model: str) -> str:
        imports = "".join(f"import {module}\n" for module in sorted(imports_of(written) - {"builtins"}))
        body = "\n".join(f"    {step}" for step in self) or "    pass"
        return f'"""A schedule of {model}."""\n\n{imports}{chr(10) * 2 if imports else ""}def schedule(sch):\n{body}\n'

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return "\n".join(line for step in self._steps for line in step.lines())


@contextmanager
def error_prefix(place: str) -> Iterator[None]:
    """Raise any error of the block as a ``ScheduleError`` that begins with ``place``."""
    try:
        yield
    except Exception as err:
        raise ScheduleError(f"{place}: {'' if isinstance(err, SlapoError) else f'{type(err).__name__}: '}{err}") from err
