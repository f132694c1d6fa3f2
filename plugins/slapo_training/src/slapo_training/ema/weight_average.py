"""Exponential moving averages of the weights that an engine trains: updated together, and saved in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError, get_logger, parameter_facts

from ..checkpoint.async_save import Buffers
from ..distributed.ranks import Ranks
from ..model.pieces import Piece, assemble
from .master_values import MasterValue, MasterWeights, copy_of, lerp

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
        """Raise ``BuildError`` if the model has averaged weights now, which ``what`` would use as the engine's."""
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
            get_logger().warning("the checkpoint has no moving average of weights; it starts anew from the loaded weights")
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


class WeightAverage:
    """Exponential moving average of an engine's weights; each rank has its shards.

    Args:
        engine: The engine.
        mark_applied: Context in which the model has averaged weights.
        decay: Fraction of the average that remains in each step.
        use_buffers: True to average buffers as well.

    Attributes:
        decay: The fraction.
        num_updates: Number of averaged steps, including those before a loaded checkpoint.
    """

    def __init__(
        self, engine: MasterWeights, mark_applied: Callable[[], AbstractContextManager[None]], decay: float, use_buffers: bool
    ) -> None:
        self._engine, self._mark_applied, self.decay, self._use_buffers = engine, mark_applied, decay, use_buffers
        self.num_updates = 0
        self._masters: list[MasterValue] = []
        self._values: dict[str, torch.Tensor] = {}
        self.include()

    def include(self) -> None:
        """Include the values that are trainable now; the average of an unfrozen one starts at its value."""
        found = self._engine.masters()
        self._masters = [each for each in found if self._use_buffers or not each.is_buffer]
        self._values = {
            each.name: self._values[each.name] if each.name in self._values else copy_of(each.value) for each in self._masters
        }

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights; engines call this after each optimizer step."""
        averages, values = [*self._values.values()], [each.value for each in self._masters]
        if self.num_updates:
            lerp(averages, values, 1 - self.decay)
        else:
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the engine evaluates, and ``export_weights`` exports, averaged weights. Collective.

        The engine's own weights are restored afterwards.
        """
        with self._mark_applied():
            kept = [each.value.detach().clone() for each in self._masters]
            self._write([*self._values.values()])
            try:
                yield
            finally:
                self._write(kept)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for master, value in zip(self._masters, values, strict=True):
            master.value.detach().copy_(value)
        self._engine.use_masters()

    def full_state(self) -> dict[str, torch.Tensor]:
        """Return the averaged model's full tensors by original name, on every rank, on the CPU. Collective.

        Frozen parameters, and by default buffers, have the model's values. Averages are in fp32 if the model is in half
        precision. For models that one process cannot hold, ``export_weights`` within ``applied`` writes tensor by tensor.
        """
        engine, ranks = self._engine, Ranks.of(self._engine.program)
        everyone = ranks.gather(([each.name for each in self._masters], _names(engine)))
        averaged = {name for own, _ in everyone for name in own}  # also on ranks to which ZeRO assigns no element of a tensor
        pieces = {name: [piece] for name, piece in engine.pieces().items() if name not in averaged}
        pieces |= {each.name: [*each.pieces(self._values[each.name])] for each in self._masters}
        keys = {name: own for _, found in reversed(everyone) for name, own in found.items()}
        state: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(name for own in ranks.gather([*pieces]) for name in own):
            parts = ranks.gather([piece._replace(tensor=piece.tensor.cpu()) for piece in pieces.get(name, ())])
            found = assemble(piece for each in parts for piece in each)
            state |= dict.fromkeys(keys.get(name, (name,)), found)
        return state

    def facts(self) -> dict[str, Any]:
        return {"decay": self.decay, "num_updates": self.num_updates, "use_buffers": self._use_buffers}

    def saved_entries(self, number: int) -> Iterator[tuple[str, MasterValue, torch.Tensor]]:
        """Iterate over keys in a checkpoint, places and values."""
        replica = self._engine.program.axis_rank("dp")
        for each in self._masters:
            yield _key(number, each, replica), each, self._values[each.name]

    def loaded_entries(self, number: int) -> Iterator[tuple[list[str], MasterValue, torch.Tensor]]:
        """Iterate like ``saved_entries``; if a replica's own buffer is missing, that of the first replica is read."""
        replica = self._engine.program.axis_rank("dp")
        self.include()
        for each in self._masters:
            yield [_key(number, each, replica), _key(number, each, 0)], each, self._values[each.name]

    @torch.no_grad()
    def take(self, found: tuple[int, list[torch.Tensor]] | None) -> None:
        """Restore values of a checkpoint in the order of ``loaded_entries``; with None, restart from the engine's weights."""
        names = [*self._values]
        if found is None:
            self.num_updates, self._values = 0, {}
        else:
            self.num_updates, values = found
            self._values = dict(zip(names, values, strict=True))
        self.include()


def _key(number: int, master: MasterValue, replica: int) -> str:
    """Return the key of a value in a checkpoint. Replicas may have different buffers."""
    return f"{number}.buffer.{replica}.{master.name}" if master.is_buffer else f"{number}.{master.name}"


def _names(engine: MasterWeights) -> dict[str, tuple[str, ...]]:
    """Return all original names of this rank's tensors, by the first one."""
    modules = engine.module if isinstance(engine.module, torch.nn.Module) else torch.nn.ModuleList(engine.module)
    named = [*modules.named_parameters(), *modules.named_buffers()]
    return {own[0]: own for name, tensor in named for own in [parameter_facts(tensor).names or (name,)]}
