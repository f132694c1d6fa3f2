"""Exponential moving average of the weights that an engine trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from slapo_core import parameter_facts

from ..distributed.ranks import Ranks
from ..model.pieces import assemble
from .master_values import MasterValue, MasterWeights, copy_of, lerp


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
