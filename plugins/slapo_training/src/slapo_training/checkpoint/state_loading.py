"""Loading of saved states into foreign code, with rollback if it raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slapo_core import BuildError, failure_reason


class StateLoading:
    """Loads states one by one; ``roll_back`` restores the earlier states."""

    def __init__(self) -> None:
        self._before: list[tuple[Callable[[Any], Any], Any]] = []

    def load(self, what: str, take: Callable[[Any], Any], state: Any, now: Callable[[], Any]) -> None:
        """Load one state by ``take``; ``now`` returns the current one, and ``what`` is the name of its owner, for the error.

        Raises:
            BuildError: ``take`` or ``now`` raised.
        """
        try:
            self._before.append((take, now()))
            take(state)
        except Exception as err:
            raise BuildError(f"{what} does not accept its saved state: {failure_reason(err)}; build with the same") from err

    def roll_back(self) -> None:
        """Load the earlier states again, in reverse order."""
        for take, before in reversed(self._before):
            with suppress(Exception):
                take(before)
