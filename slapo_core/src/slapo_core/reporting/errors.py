"""Every error a user can meet. ``assert`` is for our own bugs only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlapoError(Exception):
    """Base of all errors raised on purpose."""


class ScheduleError(SlapoError):
    """An illegal step of a schedule; nothing was changed.

    Args:
        message: One lower-case sentence, what is wrong with the value and what would work.
        path: Dotted path of the module the step was for; ``""`` is the top module.
        primitive: Name of the primitive, put in front of the message when given.
    """

    def __init__(self, message: str, *, path: str = "", primitive: str | None = None) -> None:
        self.path = path
        self.primitive = primitive
        super().__init__(f"{primitive}({path!r}): {message}" if primitive else message)


class PluginError(SlapoError):
    """A plugin that cannot be used; ``owner`` names it with its distribution and version."""

    def __init__(self, message: str, *, owner: str) -> None:
        self.owner = owner
        super().__init__(message)


class UnknownNameError(SlapoError, LookupError):
    """A primitive, dialect, path or option nobody provides."""

    @classmethod
    def of(cls, kind: str, name: str, available: Iterable[str], notes: Iterable[str] = (), whose: str = "") -> UnknownNameError:
        """Say what was asked for (and ``whose`` it would be), the nearest known name, what is available, and ``notes``."""
        known = sorted(available)
        parts = [f"no {kind} {name!r}" + (whose and f" of {whose}")]
        if near := difflib.get_close_matches(name, known, n=1):
            parts.append(f"did you mean {near[0]!r}?")
        parts.append(f"available: {', '.join(known) or 'none'}")
        return cls("; ".join([*parts, *notes]))


class TraceError(SlapoError):
    """A module that cannot be traced.

    Args:
        message: One lower-case sentence.
        source: The model's own ``file:line``, when known.
        failing_module: Path, in the model, of the innermost module in whose recorded forward the trace failed, when known.
    """

    def __init__(self, message: str, *, source: str | None = None, failing_module: str | None = None) -> None:
        self.source, self.failing_module = source, failing_module
        super().__init__(f"{message} ({source})" if source else message)


class BuildError(SlapoError):
    """A schedule that cannot be handed to the engine as configured."""


class VerifyError(SlapoError):
    """The scheduled model does not compute what the unmodified one computes."""
