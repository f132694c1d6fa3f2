"""Record of one stage whose passes are cut at its blocks, so that any number of equal ones can be put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slapo_training import GradientSize

from ..recording.segments import PassRecord, Segments
from .stage_record import StageRecord


@dataclass(frozen=True, eq=False)
class SegmentedStage:
    """One micro-batch through one stage; the fields are those of ``StageRecord``, with passes cut at blocks.

    Args:
        optimizer: The first step of the optimizer on all parameters that ran.
        block_optimizer: The same on the parameters of each block that stands for others, by path.
        block_gradients: Bytes of the gradients of each of these, by path.
        block_outputs: Bytes of the first tensor that each block returned, by path.
    """

    begin: PassRecord
    forward: Segments
    first_backward: Segments
    next_backward: Segments
    inputs_backward: Segments | None
    first_weights: Segments
    next_weights: Segments
    end: PassRecord
    optimizer: PassRecord
    received: int
    sent: int
    sent_back: int
    gradients: int
    block_optimizer: Mapping[str, PassRecord] = field(default_factory=dict)
    block_gradients: Mapping[str, int] = field(default_factory=dict)
    block_outputs: Mapping[str, int] = field(default_factory=dict)
    arrivals: tuple[GradientSize, ...] = ()
    unused: int = 0

    def record(self, repeated: Mapping[str, int], parameters: int, buffers: int, numbers: int) -> StageRecord:
        """Return the record of the stage in which some blocks run more often, each right behind itself.

        Args:
            repeated: Number of further blocks that are like one, by path.
            parameters: Bytes of all parameters between steps.
            buffers: Bytes of buffers.
            numbers: Number of elements of all parameters.
        """
        steps = [self.block_optimizer[path] for path, times in repeated.items() for _ in range(times)]
        inputs = self.inputs_backward
        return StageRecord(
            begin=self.begin,
            forward=self.forward.whole(repeated),
            first_backward=self.first_backward.whole(repeated),
            next_backward=self.next_backward.whole(repeated),
            inputs_backward=None if inputs is None else inputs.whole(repeated),
            first_weights=self.first_weights.whole(repeated),
            next_weights=self.next_weights.whole(repeated),
            end=self.end,
            optimizer=PassRecord.join([self.optimizer, *steps]),
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            parameters=parameters,
            buffers=buffers,
            gradients=self.gradients + sum(self.block_gradients[path] * times for path, times in repeated.items()),
            numbers=numbers,
            arrivals=self.arrivals,
            unused=self.unused,
        )
