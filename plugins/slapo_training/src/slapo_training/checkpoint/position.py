"""Position of a training run, which a checkpoint keeps once for all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from slapo_core import BuildError

from .plain_data import check_plain, digest


class Position(NamedTuple):
    """Position of a training run.

    Args:
        steps: Batches that were trained.
        extra: What the user gave to ``save``, the same on every rank.
    """

    steps: int
    extra: Any

    def words(self) -> str:
        """Return this rank's values for ``check_same``; raise ``BuildError`` where they are not plain data."""
        check_plain(self.extra, "extra")
        return digest(self.extra)

    @staticmethod
    def check_same(ranks: Iterable[str]) -> None:
        """Raise ``BuildError`` where ranks have said different words."""
        if len(set(ranks)) > 1:
            raise BuildError("the ranks save different extra; give all of them the same, as it is kept once")
