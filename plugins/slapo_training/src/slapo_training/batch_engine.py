"""Base of engines that weigh each micro-batch while the batch runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from slapo_core import BuildError, Program, gather_objects

from .batch_agreement import Cut, compute_weights, cut_together
from .batch_arguments import arguments_of
from .batches.microbatches import (
    Batch,
    LabelKey,
    check_labels,
    content_fingerprint,
    fingerprint,
    label_counts,
    signature,
    split,
    variadic_argument,
)
from .distributed.ranks import all_reduce, run_on_all_ranks
from .ema import AveragedEngine
from .first_step import FirstStep
from .first_step.injected_check import divide_gradients
from .label_weights import HiddenLabels, LabelWeights
from .losses.microbatch_loss import note_failure
from .losses.reductions import EQUAL_PARTS, LossReduction, terms_of
from .model.state_rollback import state_rollback
from .options.common_options import EngineOptions
from .step_losses import CheckedStepLosses

__all__ = ["BatchEngine", "MicroBatches"]


class MicroBatches(NamedTuple):
    """A batch, cut for one step.

    Args:
        parts: The model's arguments for each micro-batch.
        labels: The labels of each for a loss function, or its loss in their place; None where the model makes the loss itself.
        weights: What each weighs in the loss; None for all alike.
    """

    parts: list[Batch]
    labels: list[Any]
    weights: LabelWeights | None


class BatchEngine(AveragedEngine):
    """Cuts a batch, tells what its micro-batches weigh, and leaves the rest to an engine that sums gradients as it goes.

    Every method is collective over the mesh. An error within a step, which its other ranks may wait for, ends the engine.

    Attributes:
        steps: Batches that were trained, those before the checkpoint that was loaded included.
        grad_norm: Norm of all gradients of the last step before clipping; without ``clip`` None where the engine computes none.
    """

    def __init__(self, program: Program, options: EngineOptions) -> None:
        self.program, self._common, self._trains = program, options, options.trains
        self._kinds: set[LabelKey] | None = None
        self._ignored, self._is_told = options.ignored_label, False
        self._is_broken = self._is_half_read = self._is_closed = False
        self.grad_norm: float | None = None
        self.steps = 0
        self._trained: dict[str, tuple[nn.Parameter, bool]] = {}
        self.moves_parameters = self.takes_gradients = False
        self.superseded = ""
        self._losses: CheckedStepLosses | None = None
        self._hidden = HiddenLabels(program)
        self._first = FirstStep(program, options)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank trains, by name; none once the engine is closed."""
        found = {} if self._is_closed or not self._trains else self._trained
        return {name: parameter for name, (parameter, is_trained) in found.items() if is_trained}

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of this rank."""

    @abstractmethod
    def _train(self, batch: MicroBatches) -> tuple[torch.Tensor, list[LossReduction]]:
        """Take one step. Return its loss, the same on all ranks, and on ranks that compute losses their reductions."""

    @abstractmethod
    def _evaluate(self, batch: MicroBatches, training: bool = False) -> tuple[torch.Tensor, list[LossReduction]]:
        """Return the loss without gradients, the same on all ranks, and on ranks that compute losses their reductions."""

    def train_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        """Forward, backward and one optimizer step; see ``Engine.train_batch``.

        Raises:
            BuildError: there is no optimizer; the batch cannot be cut into equal micro-batches; the micro-batches or ranks have
                different numbers of labels, and which of them the loss counts cannot be told; the first step's checks refuse
                the model, see ``FirstStep``.
        """
        if not self._trains:
            raise BuildError("this engine was built without an optimizer and only evaluates; pass optimizer= to build")
        self._check_weights()
        self.averages.check_idle("train_batch")
        if self.superseded:
            raise BuildError(
                f"another engine was built that trains {self.superseded!r}, and its memory has moved there; train each "
                "parameter by one engine, freeze it before the other one is built, or use target='torch'"
            )
        if self._is_broken:
            raise BuildError(
                f"a step of this engine failed with an error, and {self._common.target} has kept a part of its "
                "gradients; build another engine, and load a checkpoint"
            )
        cut = self._cut(args, batch, training=True)
        self._first.check(cut.parts, cut.labels, self.device)
        scale = self._first.scale(len(cut.parts))
        if cut.weights is not None:
            cut.weights.gradient = scale
        forward = partial(self._forward, cut, training=True)
        cut = cut._replace(labels=self._losses_of().train(cut.parts, cut.labels, self.module, forward))
        self._is_broken = True
        try:
            with divide_gradients((parameter for parameter, _ in self._trained.values()), scale):
                loss, reductions = self._train(cut)
            self._compare(reductions, cut, training=True)
        except Exception as err:
            for labels in cut.labels:
                note_failure(labels, err)
            raise
        self._is_broken = False
        self._end_step(self._has_stepped())
        return loss

    def _has_stepped(self) -> bool:
        """Return whether the optimizer has taken the last step; not where gradients overflowed."""
        return True

    @torch.no_grad()
    def eval_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        self._check_weights()
        cut = self._cut(args, batch, training=False)

        def run(labels: list[Any]) -> torch.Tensor:
            loss, reductions = self._evaluate(cut._replace(labels=labels))
            self._compare(reductions, cut, training=False)
            return loss

        forward = partial(self._forward, cut, training=False)
        return self._losses_of().evaluate(cut.parts, cut.labels, self.module, forward, run)

    def _losses_of(self) -> CheckedStepLosses:
        if self._losses is None:
            on_all_ranks = partial(run_on_all_ranks, program=self.program)
            self._losses = CheckedStepLosses(self.program, self._common, self.device, on_all_ranks)
        return self._losses

    @torch.no_grad()
    def _forward(self, batch: MicroBatches, labels: list[Any], training: bool) -> None:
        """Run micro-batches forward alone, with these in the place of labels."""
        self._evaluate(batch._replace(labels=labels), training)

    @contextmanager
    def _load_context(self) -> Iterator[None]:
        """While a checkpoint is put into the engine: if that breaks off, it does nothing before another one is loaded."""
        self._is_half_read = True
        yield
        self._is_half_read = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise BuildError("this engine is closed; build another one")

    def _check_weights(self) -> None:
        self._check_open()
        if self._is_half_read:
            raise BuildError("loading a checkpoint failed halfway, and this engine's weights may have changed; load another")

    def _cut(self, args: Sequence[Any], given: Mapping[str, Any], training: bool) -> MicroBatches:
        """Return the micro-batches, their labels for a loss function, and their weights. Collective."""
        keys: list[LabelKey] = []

        def cut() -> Cut:
            keys[:], own = self._own_cut(args, given, training)
            return own

        parts, weights, self._first.is_uneven = cut_together(self.program, self.device, cut)
        given_parts = [self._common.batch_rows.without_variable_sizes(part) for part in parts]
        labels = [None if self._common.loss_fn is None else part.pop("labels", None) for part in parts]
        parts = [self._in_precision(part) for part in parts]
        if self._losses_of().are_whole:
            return MicroBatches(parts, labels, LabelWeights.equal(len(parts)))
        batch = MicroBatches(parts, labels, weights)
        is_new = not self._hidden.is_checked and len(parts) * self.program.axis_size("dp") > 1
        reductions = self._trial_reductions(batch, training) if weights.is_open or is_new else None
        if reductions is not None:
            keys, weights = self._learn_labels(reductions, given_parts, keys, weights)
            batch = batch._replace(weights=weights)
        if self._kinds is not None:
            weights.known = self._known_indices(keys)
            weights.kind = weights.known[0]
        if reductions is not None:
            self._compare(reductions, batch, training)
        weights.is_shown = training in self._hidden.shown
        return batch

    def _own_cut(self, args: Sequence[Any], given: Mapping[str, Any], training: bool) -> tuple[list[LabelKey], Cut]:
        """Return this rank's micro-batches, and what may be their labels; touches no other rank."""
        if training:
            self._check_frozen()
        batch, rows = arguments_of(self.program.module, args, given, self._common), self._common.batch_rows
        parts = split(batch, self._common.parts, several=variadic_argument(self.program.module), rows=rows)
        if training:
            self._check_trained(parts[0])
        check_labels(batch, self.program.module, self._common.loss_fn, self._common.loss_over is None)
        self._losses_of().count(parts)
        alike = [rows.without_variable_sizes(part) for part in parts]
        keys, counts = label_counts(alike, self._ignored, self._is_told)
        shape, marks = fingerprint([training, signature(alike[0])]), self._first.marks(parts, training)
        return keys, Cut(parts, counts, self._known_indices(keys), shape, content_fingerprint(batch), marks)

    def _learn_labels(
        self, reductions: list[LossReduction], parts: list[Batch], keys: list[LabelKey], weights: LabelWeights
    ) -> tuple[list[LabelKey], LabelWeights]:
        """Find by a batch's losses which labels count. Return what may be its labels, and the weights, anew. Collective."""
        if self._learns_ignored(reductions):
            keys, counts = label_counts(parts, self._ignored, self._is_told)
            weights = compute_weights(self.program, self.device, counts, self._known_indices(keys))
        if weights.is_open:
            self._kinds = {keys[kind] for kind in self._kinds_of(reductions, weights, len(keys))}
        return keys, weights

    def _known_indices(self, keys: Sequence[LabelKey]) -> list[int]:
        """Return the indices of those that the loss may be a mean over, by what losses have shown."""
        found = [index for index, key in enumerate(keys) if self._kinds is not None and key in self._kinds]
        return found or [*range(len(keys))]

    def _learns_ignored(self, reductions: list[LossReduction]) -> bool:
        """Note the label value that losses leave out. Return whether labels have to be counted anew. Collective."""
        own = {term.ignore_index for reduction in reductions for term in terms_of(reduction)}
        found = {each for of_rank in gather_objects(own, self.program.mesh) for each in of_rank}
        if len(found) != 1:
            return False
        before = self._ignored, self._is_told
        self._ignored, self._is_told = found.pop(), True
        return before[0] != self._ignored or (not before[1] and self._ignored >= 0)

    def _compare(self, reductions: list[LossReduction], batch: MicroBatches, training: bool) -> None:
        """Check that losses are means over equal numbers of labels, where the batch does not show these. Collective."""
        if batch.weights is None or self._losses_of().are_whole:
            return
        if len(batch.parts) * self.program.axis_size("dp") > 1:
            self._hidden.check(reductions, batch.weights, training)

    def _check_trained(self, part: Batch) -> None:
        """Raise ``BuildError`` where the engine was configured for other micro-batches than this one; one rank alone."""

    def _check_frozen(self) -> None:
        """Raise ``BuildError`` where it has changed what is trained, which the optimizer does not see; one rank alone."""
        for name, (parameter, is_trained) in self._trained.items():
            if parameter.requires_grad != is_trained:
                what = "frozen" if is_trained else "unfrozen"
                raise BuildError(
                    f"{name!r} was {what} after build, which the optimizer of target {self._common.target!r} does not see; "
                    "build another engine"
                )

    def _in_precision(self, part: Batch) -> Batch:
        """A micro-batch with its floating-point tensors in the type of the weights."""
        if (dtype := self._common.dtype) is torch.float32:
            return part
        return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, part)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _trial_reductions(self, batch: MicroBatches, training: bool) -> list[LossReduction]:
        """Return the reductions of losses, by a forward that leaves the model and random numbers as they are. Collective."""
        try:
            with state_rollback(self.module.modules()):
                return [*self._evaluate(batch._replace(weights=None), training)[1]]
        except RuntimeError:
            if len(self.program.stages) > 1 or not training:
                raise
        with state_rollback(self.module.modules()), torch.enable_grad():  # a forward that differentiates, as by a penalty
            return [*self._evaluate(batch._replace(weights=None), training)[1]]

    def _kinds_of(self, losses: list[LossReduction], weights: LabelWeights, number: int) -> list[int]:
        """Return the kinds of labels that the loss may count, see ``LabelWeights``; the same on all ranks. Collective.

        Raises:
            BuildError: on all ranks: the losses count labels differently.
        """
        possible = set(range(number))

        def look() -> None:
            for index, counted in enumerate(losses):
                possible.intersection_update(weights.kinds_of(index, counted))

        run_on_all_ranks(look, self.program)
        mask = torch.tensor([int(kind in possible) for kind in range(number)], device=self.device)
        found = all_reduce(mask, self.program.mesh, dist.ReduceOp.MIN).tolist()
        if not any(found):
            raise BuildError(
                f"micro-batches have different numbers of labels, and losses count them differently; {EQUAL_PARTS}"
            )
        return [kind for kind, is_possible in enumerate(found) if is_possible]
