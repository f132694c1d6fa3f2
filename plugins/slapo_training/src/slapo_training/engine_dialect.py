"""A dialect whose engine is another project's: which version of it, and what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from slapo_core.dialect import Dialect
from slapo_core.errors import BuildError
from slapo_core.program import Program


class Limit(NamedTuple):
    """Something that an engine cannot do.

    Args:
        asked: What, as it reads behind "cannot do".
        instead: What to do in its place.
        applies: Whether a program with these options asks for it, or what in them does. It makes no process group and changes
            nothing.
    """

    asked: str
    instead: str
    applies: Callable[[Program, Any], bool | str]


class EngineDialect(Dialect):
    """A dialect for the engine of another project.

    Attributes:
        distribution: The engine's, as it is installed.
        tested: The version of it that this dialect was tested with.
        limits: What the engine cannot do, in the order in which it is asked.
    """

    distribution: ClassVar[str]
    tested: ClassVar[str]
    limits: ClassVar[tuple[Limit, ...]] = ()

    @classmethod
    def check_limits(cls, program: Program, options: Any) -> None:
        """Raise ``BuildError`` for the first limit that applies."""
        for limit in cls.limits:
            if found := limit.applies(program, options):
                what = f"{limit.asked} ({found})" if isinstance(found, str) else limit.asked
                raise BuildError(f"target {cls.name!r} cannot do {what}; {limit.instead}")
