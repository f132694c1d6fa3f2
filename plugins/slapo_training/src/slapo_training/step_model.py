"""Interface by which planners read about a training step of a dialect, without processes, weights or an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

MessageMode = Literal["overlapped", "on_demand", "blocking"]
"""How an engine sends tensors between stages.

``"overlapped"``: a message leaves when its tensor is ready, while both ranks go on computing.
``"on_demand"``: the sender goes on; the transfer begins when the receiver waits for it.
``"blocking"``: as ``"on_demand"``, and the sender waits for the transfer before its next action of the other direction, or
after its next action of the same direction.
"""


class PipelineAction(NamedTuple):
    """One computation of a rank of a pipeline.

    Args:
        kind: ``"F"`` forward, ``"B"`` backward; ``"I"`` and ``"W"`` are the parts of a backward for inputs and for weights.
        stage: Index of the stage.
        microbatch: Index of the micro-batch.
    """

    kind: str
    stage: int
    microbatch: int


class StepModel:
    """Facts about a training step of one dialect, computed from its options alone.

    A dialect publishes a subclass as ``classes["step_model"]``. ``config`` holds the options of ``build``; missing ones have
    their defaults.
    """

    @classmethod
    def action_order(
        cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int
    ) -> dict[int, list[PipelineAction]]:
        """Return the computations of each rank of one pipeline in the order in which the engine runs them.

        Args:
            config: Options of ``build``.
            stages: Number of stages.
            ranks: Number of ranks along ``pp``.
            microbatches: Number of micro-batches of a step.

        Returns:
            For each rank along ``pp`` its actions; without a pipeline, rank 0 alternates forwards and backwards. Callers must
            not change the lists.

        Raises:
            BuildError: the schedule cannot run so many stages or micro-batches.
        """
        raise NotImplementedError

    @classmethod
    def message_mode(cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int) -> MessageMode:
        """Return how the engine sends tensors between stages; arguments as of ``action_order``."""
        return "blocking"

    @classmethod
    def overlaps_reduction(cls, config: Mapping[str, Any], stages: int, ranks: int) -> bool:
        """Return True if gradients are reduced over replicas during the last backward of a stage; False if after it."""
        return False


def one_forward_one_backward(stages: int, microbatches: int) -> dict[int, list[PipelineAction]]:
    """Return the order of 1F1B with one stage per rank; without a pipeline, of gradient accumulation.

    Rank ``r`` runs ``stages - r`` forwards, then backwards and forwards by turns, then the backwards that are left.
    """
    order = {}
    for rank in range(stages):
        warmup = min(microbatches, stages - rank)
        row = [PipelineAction("F", rank, index) for index in range(warmup)]
        for index in range(microbatches):
            row.append(PipelineAction("B", rank, index))
            if index + warmup < microbatches:
                row.append(PipelineAction("F", rank, index + warmup))
        order[rank] = row
    return order
