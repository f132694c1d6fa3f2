"""States that are handed to others' code, which may refuse them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slapo_core.causes import reason
from slapo_core.errors import BuildError


class Handed:
    """What was handed to whom, so that all have again what they had where one refuses."""

    def __init__(self) -> None:
        self._before: list[tuple[Callable[[Any], Any], Any]] = []

    def to(self, what: str, take: Callable[[Any], Any], state: Any, now: Callable[[], Any]) -> None:
        """Hand one its state.

        Args:
            what: Its name.
            take: What takes the state.
            state: What was saved.
            now: Gives the state that it has.

        Raises:
            BuildError: it did not take it.
        """
        try:
            self._before.append((take, now()))
            take(state)
        except Exception as err:
            raise BuildError(f"{what} does not take what was saved of it: {reason(err)}; build with the same") from err

    def take_back(self) -> None:
        """Let each have what it had, as far as it takes that."""
        for take, before in reversed(self._before):
            with suppress(Exception):
                take(before)
