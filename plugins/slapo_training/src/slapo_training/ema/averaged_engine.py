"""``slapo.ema``, and the base class of the engines whose weights it averages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from os import PathLike
from typing import Any

from slapo_core import BuildError, Engine

from ..checkpoint.async_save import Buffers, SaveHandle, Saver
from ..checkpoint.plain_data import Position
from ..distributed.ranks import Ranks
from .master_values import MasterWeights
from .weight_average import AverageList, WeightAverage


class AveragedEngine(MasterWeights):
    """Engine that updates its averages after each step, and saves them in its checkpoints."""

    steps: int
    _saver: Saver

    @cached_property
    def averages(self) -> AverageList:
        """Averages of this engine's weights, made by ``slapo.ema``."""
        return AverageList()

    def averaging_problem(self) -> str:
        """Return the reason why this engine's weights cannot be averaged; empty if they can."""
        return ""

    def save(self, path: str | PathLike[str], *, extra: Any = None, wait: bool = True) -> SaveHandle:
        """Write a checkpoint to a directory; one there is replaced. Collective.

        Args:
            path: Directory, the same on every rank.
            extra: Plain data that ``load`` returns, e.g. the data loader's position; the same on every rank.
            wait: False to return once all data is copied, and to write it while training continues. The next save, load or
                close waits for the write and raises its error.

        Returns:
            Handle of the write; the checkpoint is complete after its ``wait()``.
        """
        self._check_weights()
        self.averages.check_idle("save")
        position = Position(self.steps, extra)
        with self._call_context():
            return self._saver.write(lambda ranks, copies: self._prepare_save(path, position, ranks, copies), wait)

    def load(self, path: str | PathLike[str]) -> Any:
        """Restore a checkpoint of ``save``: exactly on the same layout, with the same losses on any other layout. Collective.

        Random states are restored on the same layout only. On another layout dropout uses new random numbers, derived from
        the checkpoint's random state and from each rank's seed.

        Returns:
            The ``extra`` of ``save``.

        Raises:
            BuildError: no complete checkpoint, a damaged one, or one of another model or optimizer; nothing has changed. Or
                another project's engine cannot read it to its end, and does nothing before another one is loaded.
        """
        self._check_open()
        self.averages.check_idle("load")
        self._saver.finish_last_save()
        with self._call_context():
            self.steps, extra = self._load(path)
        return extra

    def _check_open(self) -> None:
        """Raise ``BuildError`` if the engine no longer loads."""

    def _check_weights(self) -> None:
        """Raise ``BuildError`` if the engine's weights cannot be saved."""

    def _call_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    @abstractmethod
    def _prepare_save(
        self, path: str | PathLike[str], position: Position, ranks: Ranks, copies: Buffers | None
    ) -> Callable[[Ranks], None]:
        """Return a writer of the engine as it is now, see ``Saver.write``. Collective."""

    @abstractmethod
    def _load(self, path: str | PathLike[str]) -> Position:
        """Read a checkpoint into the engine. Collective."""

    def _end_step(self, is_stepped: bool = True) -> None:
        """Count a trained batch, and update the averages if the optimizer stepped, which it does not if gradients overflow."""
        self.steps += 1
        if is_stepped:
            self.averages.update()


def ema(engine: Engine, decay: float = 0.999, *, use_buffers: bool = False) -> WeightAverage:
    """Keep an exponential moving average of an engine's weights.

    The average equals that of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``, updated after each
    optimizer step: the weights of the first step are copied, later ones averaged. Each rank averages the values that its own
    optimizer steps, with no message. Checkpoints of the engine include the averages, for any layout. Collective.

    Args:
        engine: Engine from ``build`` with an optimizer. Call ``ema`` before ``load``.
        decay: Fraction of the average that remains in each step, from 0 to 1.
        use_buffers: True to average buffers as well; by default they are the model's.

    Raises:
        BuildError: on every rank: the engine takes no steps, or another decay was given on another rank.
    """
    if not isinstance(engine, AveragedEngine):
        raise BuildError(
            f"ema: {type(engine).__name__} takes no steps; use torch.optim.swa_utils.AveragedModel(engine.module), or build "
            "for target='torch'"
        )
    ranks, made = Ranks.of(engine.program), list[WeightAverage]()

    def make() -> tuple[float, bool]:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise BuildError(f"ema: decay is {decay!r}; give a number from 0 to 1, 0.999 say")
        if reason := engine.averaging_problem():
            raise BuildError(f"ema: {reason} cannot be averaged; build without it")
        engine.averages.check_idle("ema")
        made.append(WeightAverage(engine, engine.averages.mark_applied, decay, use_buffers))
        return decay, use_buffers

    if len(set(ranks.run_on_all(make))) > 1:
        raise BuildError("ema: the ranks were given different arguments; give all of them the same")
    engine.averages.items.append(made[0])
    return made[0]
