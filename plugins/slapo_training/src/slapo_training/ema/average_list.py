"""Averages of one engine: updated together, and saved in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError, get_logger

from ..checkpoint.async_save import Buffers
from ..distributed.ranks import Ranks
from ..model.pieces import Piece
from .weight_average import WeightAverage

if TYPE_CHECKING:
    from ..checkpoint.folder import Checkpoint

KEY = "averages"
"""Key in a checkpoint's manifest, and name of the folder of the tensors."""

Averages = list[tuple[int, list[torch.Tensor]] | None]
"""Number of updates and values of each average; None if the checkpoint has none."""


class AverageList:
    """Averages of one engine's weights, in the order of their construction."""

    def __init__(self) -> None:
        self.items: list[WeightAverage] = []
        self._copies: Buffers = {}
        self.is_applied = False

    def update(self) -> None:
        for each in self.items:
            each.update()

    def include(self) -> None:
        for each in self.items:
            each.include()

    def check_idle(self, what: str) -> None:
        """Refuse a call that would use averages as the engine's weights.

        Raises:
            BuildError: the model has averaged weights now.
        """
        if self.is_applied:
            raise BuildError(f"{what} inside of applied(), where the model has averaged weights; call it outside")

    @contextmanager
    def mark_applied(self) -> Iterator[None]:
        """Context in which the model has averaged weights."""
        self.check_idle("applied()")
        self.is_applied = True
        try:
            yield
        finally:
            self.is_applied = False

    def manifest_facts(self) -> dict[str, Any]:
        """Return the facts for a checkpoint's manifest, the same on every rank."""
        return {KEY: [each.facts() for each in self.items]} if self.items else {}

    def prepare_save(self, ranks: Ranks, is_copied: bool) -> Callable[[Path, Ranks], None]:
        """Return a function that writes the current averages, given the folder and the ranks to use. Collective.

        They are copied if training continues during the write.
        """
        if not self.items:
            return lambda folder, meeting: None
        from ..checkpoint.tensor_files import TensorFiles  # noqa: PLC0415  torch.distributed.checkpoint takes half a second

        files = TensorFiles(self._pieces(), ranks, self._copies if is_copied else None)

        def write(folder: Path, meeting: Ranks) -> None:
            meeting.run_on_first(lambda: (folder / KEY).mkdir())
            files.write(folder / KEY, meeting)

        return write

    def _pieces(self) -> dict[str, list[Piece]]:
        return {
            key: [*master.pieces(value)]
            for number, each in enumerate(self.items)
            for key, master, value in each.saved_entries(number)
        }

    def read(self, checkpoint: Checkpoint, ranks: Ranks) -> Averages:
        """Read this rank's part of a verified checkpoint; nothing changes before ``put``. Collective.

        Raises:
            BuildError: on every rank: the checkpoint has averages of other tensors.
        """
        saved: list[Mapping[str, Any]] = checkpoint.about.get(KEY, [])
        if len(saved) > len(self.items) and ranks.index == 0:
            told = "moving averages of weights: the checkpoint has %d, and the engine takes %d; call slapo.ema before load"
            get_logger().warning(told, len(saved), len(self.items))
        taken: Averages = [None] * len(self.items)
        for number, (each, facts) in enumerate(zip(self.items, saved, strict=False)):
            values: list[torch.Tensor] = []
            ranks.run_on_all(lambda: values.extend(self._values(each, number, checkpoint.data / KEY)))  # noqa: B023  called at once
            taken[number] = facts["num_updates"], values
        if len(saved) < len(self.items) and ranks.index == 0:
            get_logger().warning("the checkpoint has no moving average of weights; it begins anew with the weights loaded")
        return taken

    def _values(self, average: WeightAverage, number: int, folder: Path) -> list[torch.Tensor]:
        from ..checkpoint.tensor_files import SavedTensors  # noqa: PLC0415  torch.distributed.checkpoint takes half a second

        files = SavedTensors(folder)
        known, found, wanted = files.facts(), [], list[list[tuple[str, Piece]]]()
        for keys, master, value in average.loaded_entries(number):
            key = next((key for key in keys if key in known), None)
            if key is None or known[key][0] != tuple(master.place.full_shape):
                raise BuildError(f"the checkpoint has no moving average of {master.name!r}; build with the same model and ema")
            found.append(fresh := torch.empty_like(value))
            wanted.append([(key, piece) for piece in master.pieces(fresh)])
        for row in zip_longest(*wanted):
            files.read(dict(each for each in row if each is not None))
        return found

    def put(self, taken: Averages) -> None:
        """Restore the result of ``read``, after the engine has loaded its weights."""
        for each, found in zip(self.items, taken, strict=True):
            each.take(found)
