"""Result of a verification."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slapo_core import VerifyError

from .equivalence import Difference

if TYPE_CHECKING:
    from ..training_runs.reference_run import TrainingResults


@dataclass(frozen=True)
class Blame:
    """Cause of a difference; None means unknown.

    Args:
        step: The first wrong step, with its number, as in the journal.
        module: First module, in the order of the forward, whose output differs.
        parameter: The parameter nearest to the loss whose gradient, or weight after the step, differs.
        hint: Known cause of such a difference.
        unknown: Reason why no step is named.
        engine: Part of an engine to blame, if the schedule is right.
    """

    step: str | None = None
    module: str | None = None
    parameter: str | None = None
    hint: str | None = None
    unknown: str | None = None
    engine: str | None = None

    def __str__(self) -> str:
        lines = {
            "to blame": self.engine,
            "step to blame": self.step or (f"not known: {self.unknown}" if self.unknown else None),
            "first module that differs": self.module,
            "parameter nearest to the loss that differs": self.parameter,
            "hint": self.hint,
        }
        return "\n".join(f"{what}: {found}" for what, found in lines.items() if found)


@dataclass(frozen=True)
class Report:
    """Result of comparing two models, equal on every rank.

    Args:
        level: ``"outputs"``, ``"grads"`` or ``"step"``.
        compared: Number of compared values of each kind, e.g. ``{"outputs": 2, "gradients": 148}``.
        differences: Differences above the tolerance, in the order of the comparison.
        largest: The largest absolute error of all compared values, allowed or not; None if all are equal to the bit.
        blame: Cause of the first difference; None without one.
        notes: Restrictions of this result.
        subject: Target of the verified engine, and the other engine if any; empty for a schedule alone.
        trained: Results of the engine's training, to verify another engine against.
    """

    level: str
    compared: dict[str, int]
    differences: tuple[Difference, ...] = ()
    largest: Difference | None = None
    blame: Blame | None = None
    notes: tuple[str, ...] = ()
    subject: str = ""
    trained: TrainingResults | None = field(default=None, compare=False, repr=False)

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in self.compared.items())
        if self.ok:
            far = "all equal to the bit" if self.largest is None else f"largest error {_error(self.largest)}"
            head = f"the same: {counts}; {far}"
        else:
            total = sum(self.compared.values())
            head = f"NOT the same: {len(self.differences)} of {total} differ: {counts}\n{self.differences[0].message}"
        head = f"{self.subject}: {head}" if self.subject else head
        parts = [head, str(self.blame) if self.blame else "", *(f"note: {note}" for note in self.notes)]
        return "\n".join(filter(None, parts))

    def as_json(self) -> str:
        """Return the report as one JSON object; an infinite error is null there, and in words in its message."""
        found = asdict(replace(self, trained=None))
        del found["trained"]
        for each in [*found["differences"], *filter(None, [found["largest"]])]:
            each.update({name: None for name in ("absolute", "relative") if each[name] and not math.isfinite(each[name])})
        return json.dumps({"ok": self.ok, **found}, allow_nan=False)

    def check(self) -> Report:
        """Return the report itself if nothing differs; else raise ``VerifyError`` with it."""
        if not self.ok:
            raise VerifyError(str(self))
        return self


def _error(largest: Difference) -> str:
    return f"{largest.absolute:.3g} in {largest.what}"


def short_repr(value: Any) -> str:
    """Return a short form of a value for an error message: a model or a tensor by its class."""
    text = repr(value)
    return text if len(text) <= _MAX_REPR and "\n" not in text else f"a {type(value).__qualname__}"


_MAX_REPR = 60
"""Largest number of characters."""
