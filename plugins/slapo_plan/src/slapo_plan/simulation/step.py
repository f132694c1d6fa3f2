"""One training step: the pipeline, the reduction of gradients over replicas, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slapo_training import MessageMode

from .pipeline_run import Order, PipelineRun, run_pipeline


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step.

    Args:
        actions: Seconds of each action by stage and kind, including collectives that its rank waits for.
        messages: Seconds of each message between stages, by sending and receiving stage.
        message_mode: How messages are sent.
        reductions: Seconds to reduce the gradients of each stage over the replicas, without overlap.
        overlapped_reductions: True if a bucket is reduced during the last backward of its stage, as soon as it is full.
        buckets: Number of buckets of each stage whose reductions overlap; 1 for a stage that is missing.
        optimizer: Seconds of the optimizer of each rank along ``pp``.
        collectives: Seconds of each rank in its actions and its optimizer in which it waits for collectives.
        fixed: Seconds of collectives before the first action and after the optimizer, e.g. the check of the batch.
    """

    actions: Mapping[tuple[int, str], float]
    messages: Mapping[tuple[int, int], float] = field(default_factory=dict)
    message_mode: MessageMode = "overlapped"
    reductions: Mapping[int, float] = field(default_factory=dict)
    overlapped_reductions: bool = False
    buckets: Mapping[int, int] = field(default_factory=dict)
    optimizer: Mapping[int, float] = field(default_factory=dict)
    collectives: Mapping[int, float] = field(default_factory=dict)
    fixed: float = 0.0


@dataclass(frozen=True)
class SimulatedStep:
    """Times of one training step.

    Args:
        seconds: Seconds of the step.
        run: Times of forwards, backwards and messages.
        bubble: Share of the time without computation, from the first forward to the last backward.
        ideal_bubble: The same if messages took no time; that of ``slapo_torch.timeline.bubble`` for this order of actions.
        reduced: Time at which the gradients of each rank are reduced.
        computing: Mean over ranks of the seconds in actions and in the optimizer, without waits for collectives.
        waiting: Mean over ranks of the seconds without work for them in this order of actions.
        communicating: Rest of the step: collectives and messages that nothing hides.
        updates: Start and end of the optimizer of each rank.
    """

    seconds: float
    run: PipelineRun
    bubble: float
    ideal_bubble: float
    reduced: Mapping[int, float]
    computing: float
    waiting: float
    communicating: float
    updates: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def timeline(self, dp: int = 0, tp: int = 0) -> list[dict[str, Any]]:
        """Return actions and messages in the format of ``engine.timeline``, in seconds from the start of the pipeline.

        Reductions behind the last backward of a rank, ``"gradient reduction"``, and ``"optimizer step"`` have no micro-batch.
        """
        found = self.run.timeline(dp, tp)
        for rank, row in self.run.order.items():
            computed = self.run.ends[rank][-1] if row else 0.0
            parts = {
                "gradient reduction": (computed, self.reduced.get(rank, computed)),
                "optimizer step": self.updates.get(rank),
            }
            place = {"rank": rank, "dp": dp, "tp": tp, "stage": row[-1].stage if row else 0, "microbatch": None}
            for kind, times in parts.items():
                if times is not None and times[1] > times[0]:
                    found.append({**place, "kind": kind, "start": times[0], "end": times[1]})
        return found


def simulate_step(order: Order, costs: StepCosts) -> SimulatedStep:
    """Replay one training step of one pipeline. The optimizers of all ranks start together, behind the norm of all gradients.

    Args:
        order: Actions of each rank along ``pp``.
        costs: Seconds of the parts.

    Raises:
        ValueError: ranks wait for each other for ever.
        KeyError: an action has no seconds.
    """
    run = run_pipeline(order, costs.actions, costs.messages, costs.message_mode)
    ideal = run if not any(costs.messages.values()) else run_pipeline(order, costs.actions)
    reduced = {rank: _reduction_end(run, rank, costs) for rank in order}
    start = max(reduced.values(), default=0.0)
    updates = {rank: (start, start + costs.optimizer.get(rank, 0.0)) for rank in order}
    seconds = costs.fixed + max((end for _, end in updates.values()), default=0.0)
    ranks = max(1, len(order))
    computing = (run.busy + sum(costs.optimizer.values()) - sum(costs.collectives.values())) / ranks
    waiting = ideal.seconds - ideal.busy / ranks
    communicating = max(0.0, seconds - computing - waiting)
    return SimulatedStep(seconds, run, run.bubble, ideal.bubble, reduced, computing, waiting, communicating, updates)


def _reduction_end(run: PipelineRun, rank: int, costs: StepCosts) -> float:
    """Return the time at which all gradients of a rank are reduced.

    A stage's buckets fill evenly during its last backward; one link per rank reduces them one after the other.
    """
    last = {
        stage: index for index, (kind, stage, _) in enumerate(run.order[rank]) if kind in "BW" and costs.reductions.get(stage)
    }
    starts, ends = run.starts[rank], run.ends[rank]
    computed = ends[-1] if ends else 0.0
    free = 0.0
    for stage, index in sorted(last.items(), key=lambda item: item[1]):
        lasts = costs.reductions[stage]
        if costs.overlapped_reductions:
            share = 1 / max(1, costs.buckets.get(stage, 1))
            first = starts[index] + share * (ends[index] - starts[index])
            free = max(max(first, free) + lasts, ends[index] + share * lasts)
        else:
            free = max(free, computed) + lasts
    return max(computed, free)
