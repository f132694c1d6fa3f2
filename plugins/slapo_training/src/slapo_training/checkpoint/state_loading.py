"""Loading of saved states into others' code, with rollback where one of them raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slapo_core import BuildError, failure_reason


class StateLoading:
    """Loads states one by one, and restores those before where one fails."""

    def __init__(self) -> None:
        self._before: list[tuple[Callable[[Any], Any], Any]] = []

    def load(self, what: str, take: Callable[[Any], Any], state: Any, now: Callable[[], Any]) -> None:
        """Load one state.

        Args:
            what: Name of its owner, for the error.
            take: Loads a state.
            state: The saved state.
            now: Returns the present state.

        Raises:
            BuildError: ``take`` or ``now`` raised.
        """
        try:
            self._before.append((take, now()))
            take(state)
        except Exception as err:
            raise BuildError(f"{what} does not take what was saved of it: {failure_reason(err)}; build with the same") from err

    def roll_back(self) -> None:
        """Load the states from before again, the last first."""
        for take, before in reversed(self._before):
            with suppress(Exception):
                take(before)
