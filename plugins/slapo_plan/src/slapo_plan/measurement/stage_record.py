"""Records of one stage: its passes, the sizes of its tensors, and the order of its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slapo_training import GradientSize

from ..recording.segments import PassRecord


@dataclass(frozen=True)
class StageRecord:
    """One micro-batch through one stage on one rank.

    Args:
        begin: The start of a step, which gathers parameters that stay gathered.
        forward: A forward that is not the first of all, until its outputs are there.
        first_backward: The backward that allocates the gradients of parameters, without the gradients that it sends.
        next_backward: A backward that adds to them, alike.
        inputs_backward: The first part of a split backward, for gradients of received tensors; None if none is split.
        first_weights: The second part, for gradients of parameters, which allocates these.
        next_weights: A second part that adds to them.
        end: The end of a step, which reduces gradients and frees what was gathered.
        optimizer: The first step of the optimizer, which allocates its state.
        received: Bytes of the tensors that the stage receives.
        sent: Bytes of its outputs; 0 in the last stage.
        sent_back: Bytes of the gradients of received tensors.
        parameters: Bytes of parameters between steps.
        buffers: Bytes of buffers.
        gradients: Bytes of the gradients of parameters between steps.
        numbers: Number of elements of parameters between steps.
        arrivals: Gradients of parameters in the order in which a backward finishes them, then those of unused parameters.
        unused: Number of trainable parameters without a gradient.
        microbatches: With an engine's own tensors: forward and backward of the first micro-batch of a step, of one between,
            and of the last one with the reductions behind it; a step of fewer has fewer.
        step: With these: a step of the optimizer, whose state exists; ``optimizer`` and ``gradients`` are then empty.
        held: Bytes of these tensors between steps, by kind.
        freed: Bytes of them that are freed as a step begins.
        kept: Bytes that the first forward of all leaves in the model, e.g. in a cache.
        awaited: Bytes of the gradients of its outputs; less than ``sent`` if some need none.
        added: Bytes by which gradients grow with each micro-batch behind the first; those of sparse embeddings gain rows.
        notes: What the run leaves open, one sentence each.
    """

    begin: PassRecord
    forward: PassRecord
    first_backward: PassRecord
    next_backward: PassRecord
    inputs_backward: PassRecord | None
    first_weights: PassRecord
    next_weights: PassRecord
    end: PassRecord
    optimizer: PassRecord
    received: int
    sent: int
    sent_back: int
    parameters: int
    buffers: int
    gradients: int
    numbers: int
    arrivals: tuple[GradientSize, ...] = ()
    unused: int = 0
    microbatches: tuple[tuple[PassRecord, PassRecord], ...] = ()
    step: PassRecord | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    freed: int = 0
    kept: int = 0
    awaited: int = 0
    added: int = 0
    notes: tuple[str, ...] = ()

    def pass_of(self, kind: str, microbatch: int, count: int) -> PassRecord:
        """Return the record of a pass whose gradients exist, unless the engine has its own.

        Args:
            kind: Kind of the ``PipelineAction``.
            microbatch: Index of the micro-batch.
            count: Number of micro-batches of the step.
        """
        if self.microbatches:
            number = -1 if microbatch + 1 == count else min(microbatch, 1)
            return self.microbatches[number][kind != "F"]
        if kind == "F":
            return self.forward
        if kind == "W":
            return self.next_weights
        return self.next_backward if kind == "B" or self.inputs_backward is None else self.inputs_backward

    @property
    def gradient_growth(self) -> int:
        """Bytes of gradients that the first backward of a step leaves."""
        return self.first_backward.change - self.next_backward.change
