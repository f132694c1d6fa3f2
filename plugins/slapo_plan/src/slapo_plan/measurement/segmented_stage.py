"""Record of one stage whose passes are cut at its blocks, so that any number of equal ones can be put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slapo_training import GradientSize

from ..recording.segments import PassRecord, RepeatedBlocks, Segments
from .stage_record import StageRecord


@dataclass(frozen=True, eq=False)
class SegmentedStage:
    """One micro-batch through one stage; the fields are those of ``StageRecord``, with passes cut at blocks.

    Args:
        first_forward: The first forward of all.
        optimizer: A step of the optimizer on all parameters that ran.
        repeated_optimizer: What another set of each of the repeated blocks adds to it.
        repeated_gradients: Bytes of the gradients of each of the repeated blocks.
        block_outputs: Bytes of the first tensor that each block returned, by path.
    """

    begin: PassRecord
    first_forward: Segments
    forward: Segments
    first_backward: Segments
    next_backward: Segments
    inputs_backward: Segments | None
    first_weights: Segments
    next_weights: Segments
    end: PassRecord
    optimizer: PassRecord
    repeated_optimizer: Sequence[PassRecord]
    received: int
    sent: int
    sent_back: int
    awaited: int
    gradients: int
    repeated_gradients: Sequence[int]
    block_outputs: Mapping[str, int]
    arrivals: tuple[GradientSize, ...]
    unused: int
    added: int = 0

    def record(self, repeated: Sequence[RepeatedBlocks], parameters: int, buffers: int, numbers: int) -> StageRecord:
        """Return the record of the stage in which the repeated blocks run as often as they stand for others.

        Args:
            repeated: The repeated blocks.
            parameters: Bytes of all parameters between steps.
            buffers: Bytes of buffers.
            numbers: Number of elements of all parameters.
        """
        steps = [self.optimizer]
        for each, step in zip(repeated, self.repeated_optimizer, strict=True):
            steps += [step] * each.times
        more = zip(repeated, self.repeated_gradients, strict=True)
        inputs, forward = self.inputs_backward, self.forward.whole(repeated)
        return StageRecord(
            begin=self.begin,
            forward=forward,
            first_backward=self.first_backward.whole(repeated),
            next_backward=self.next_backward.whole(repeated),
            inputs_backward=None if inputs is None else inputs.whole(repeated),
            first_weights=self.first_weights.whole(repeated),
            next_weights=self.next_weights.whole(repeated),
            end=self.end,
            optimizer=PassRecord(
                sum(each.peak for each in steps), sum(each.change for each in steps), PassRecord.join(steps).work
            ),
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            parameters=parameters,
            buffers=buffers,
            gradients=self.gradients + sum(each.times * nbytes for each, nbytes in more),
            numbers=numbers,
            arrivals=self.arrivals,
            unused=self.unused,
            awaited=self.awaited,
            added=self.added,
            kept=max(0, self.first_forward.whole(repeated).change - forward.change),
        )
