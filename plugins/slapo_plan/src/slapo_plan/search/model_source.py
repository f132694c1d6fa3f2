"""The model of a plan: what was measured of it, the search over its layouts, and the estimates of their schedules."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import nn

from slapo_core import SlapoError, create_schedule, get_logger
from slapo_report import format_bytes
from slapo_training import StepModel

from ..estimation.estimate import estimate, step_model
from ..estimation.result import Estimate
from ..hardware import Hardware
from ..measurement.fake_process_group import fake_ranks
from .candidates import Candidate, candidate_of, replay
from .constraints import contradiction
from .engine_facts import EngineChoices
from .layouts import ContradictionError, Layout, LayoutSpace, Rejection
from .model_measurement import CHECKPOINTS, Measurement, TrimmedModel, measure_model
from .model_record import ModelRecord, as_pipeline, with_policies_of
from .part_seconds import PartSeconds

_REFINED = 10
"""Number of fastest candidates whose policies are solved for, stages are those of the cut model, and actions are replayed."""

_MORE = 3
"""Number of further candidates that may be estimated."""

Pair = tuple[ModelRecord, ModelRecord]


class ModelSource:
    """A model, its batch, and options of ``build``.

    Args:
        model: The unmodified model.
        batch: Arguments of its forward by name.
        target: Name of the dialect.
        options: Further options of ``build``.
        hardware: The cluster.
    """

    def __init__(
        self, model: nn.Module, batch: Mapping[str, Any], target: str, options: Mapping[str, Any], hardware: Hardware
    ) -> None:
        self.model, self.batch, self.target, self.hardware = model, batch, target, hardware
        self.options = {"optimizer": torch.optim.AdamW, **options}
        self.notes: list[str] = []
        self._engine = EngineChoices(_step_model(target), self.options)
        self._seconds = PartSeconds(hardware)
        self._splits = False
        self._pairs: dict[Measurement, Pair | str] = {}
        self._records: dict[tuple[Any, ...], ModelRecord | str] = {}

    @cached_property
    def _trimmed_model(self) -> TrimmedModel:
        return TrimmedModel.of(self.model, [*CHECKPOINTS])

    @cached_property
    def _few_blocks(self) -> TrimmedModel:
        return TrimmedModel.of(self.model)

    def search(
        self, ranks: int, global_batch: int, constraints: Mapping[str, tuple[Any, ...]]
    ) -> tuple[list[Candidate], list[Rejection]]:
        """Return the layouts that fit, fastest first, and those that do not.

        Raises:
            ContradictionError: the constraints leave no layout; says which of them could have another value.
        """
        pipelines, replicas = self._engine.pipelines, self._engine.replicas
        devices, blocks = self.hardware.devices_per_node, len(self._trimmed_model.blocks)
        space = LayoutSpace(ranks, global_batch, blocks, devices, constraints, pipelines, replicas)
        wanted = constraints.get("pipeline_schedule", tuple(name for name, each in pipelines.items() if each.is_default))
        self._splits = any(pipelines[name].splits_backward for name in wanted)
        candidates: list[Candidate] = []
        for tp in space.degrees():
            for layout in space.layouts(tp):
                found = self._cost(layout)
                if isinstance(found, Candidate):
                    candidates.append(found)
                elif found not in space.rejected:
                    space.rejected.append(found)
        if not candidates and not space.rejected:
            raise ContradictionError(contradiction(space))
        candidates.sort(key=lambda each: each.step_seconds)
        best: list[Candidate] = []
        while candidates and len(best) < _REFINED:
            refined = self._refine(candidates.pop(0))
            if isinstance(refined, Candidate):
                best.append(refined)
            else:
                space.rejected.append(refined)
        return sorted([*best, *candidates], key=lambda each: each.step_seconds), space.rejected

    def recomputations(self, candidate: Candidate) -> dict[str, Candidate | Rejection]:
        """Return a candidate with one checkpoint policy for all blocks, or why that does not fit, by policy.

        Its seconds are the candidate's, times the ratio that the costs of the parts give.
        """
        layout, record = candidate.layout, self._record(candidate.layout, cuts=False)
        least = self._cost(layout)
        if isinstance(record, str) or isinstance(least, Rejection) or not record.paths:
            return {}
        ratio = candidate.step_seconds / least.step_seconds
        costs = {policy: self._cost(layout, policy=policy) for policy in record.blocks}
        return {name: each if isinstance(each, Rejection) else each.with_seconds_times(ratio) for name, each in costs.items()}

    def _cost(self, layout: Layout, *, refines: bool = False, policy: str = "") -> Candidate | Rejection:
        facts = self._engine.facts(layout)
        if isinstance(facts, str):
            return Rejection(layout._asdict(), facts)
        record = self._record(layout, cuts=refines)
        if isinstance(record, str):
            return Rejection(layout.form._asdict(), record)
        blocks, stages = len(record.paths), sum(map(len, facts.stages.values()))
        if stages > 1 and blocks < stages:  # the forward reads what the lists hold, and does not call it
            settings = {"tp": layout.tp, "pp": layout.pp} if blocks < layout.pp else layout._asdict()
            return Rejection(settings, f"the model has {blocks} blocks to cut between")
        options = self._engine.build_options(layout)
        return candidate_of(record, layout, facts, self._seconds, options, self.target, solves=refines, policy=policy)

    def _refine(self, candidate: Candidate) -> Candidate | Rejection:
        """Return a candidate with policies that are solved for; a pipeline by the stages of the cut model and its order."""
        layout = candidate.layout
        found = self._cost(layout, refines=True)
        facts, record = self._engine.facts(layout), self._record(layout, cuts=True)
        if not isinstance(found, Candidate) or isinstance(facts, str) or isinstance(record, str):
            return found
        microbatches = max(action.microbatch for action in facts.order[0]) + 1
        mode = self._engine.message_mode(layout, len(found.stages), microbatches)
        return replay(found, record, facts, mode, self._seconds)

    def _record(self, layout: Layout, *, cuts: bool) -> ModelRecord | str:
        """Return the model for a layout's rows and tensor-parallel ranks, or why it cannot be measured.

        With ``cuts`` stages are those of a model that was cut; otherwise those that the whole model suggests.
        """
        staged, cuts = layout.pp > 1, cuts and layout.pp > 1
        key = layout.form, staged, cuts, layout.rows
        if key not in self._records:
            pair = self._measure_once(Measurement(layout.form, cuts, cuts and self._splits))
            record = pair if isinstance(pair, str) else pair[0].at(layout.rows, pair[1])
            self._records[key] = record if isinstance(record, str) or not staged or cuts else as_pipeline(record)
        return self._records[key]

    def _measure_once(self, how: Measurement) -> Pair | str:
        if how not in self._pairs:
            try:
                self._pairs[how] = self._measure(how)
            except SlapoError as err:
                if how == Measurement():
                    raise
                self._pairs[how] = str(err)
        return self._pairs[how]

    def _measure(self, how: Measurement) -> Pair:
        trimmed = self._few_blocks if how.stages else self._trimmed_model
        with held_messages() as held:
            try:
                one, two = self._measure_copy(trimmed, how)
            except SlapoError:
                if len(trimmed.kept) == len(trimmed.blocks):
                    raise
                one, two = self._measure_copy(TrimmedModel.with_all_blocks(self.model), how)
        self.notes += [f"tp={how.form.tp}: {message}" for message in held]
        if how.stages:
            whole = self._measure_once(replace(how, stages=False, splits=False))
            if isinstance(whole, str):
                raise SlapoError(whole)
            return with_policies_of(one, whole[0]), with_policies_of(two, whole[1])
        if not how.policy and "full" not in one.blocks:  # too few blocks for one of each kind
            full = self._measure_once(replace(how, policy="full"))
            if not isinstance(full, str):
                return _with_policy(one, full[0]), _with_policy(two, full[1])
        return one, two

    def _measure_copy(self, trimmed: TrimmedModel, how: Measurement) -> Pair:
        return measure_model(trimmed, lambda rows: with_rows(self.batch, rows), how, self.target, self.options)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate's real schedule."""
        layout = candidate.layout
        batch = with_rows(self.batch, layout.rows * layout.microbatches)
        with held_messages(), fake_ranks(pp=layout.pp, dp=layout.dp, tp=layout.tp) as mesh:
            model = copy.deepcopy(self.model)
            sch = create_schedule(model, mesh=mesh, example_inputs=with_rows(self.batch, layout.rows))
            candidate.apply(sch)
            options = {**self.options, **candidate.build_options}
            return estimate(sch, batch, self.target, hardware=self.hardware, **options)

    def check_best(self, candidates: list[Candidate], number: int) -> tuple[list[Candidate], list[Rejection]]:
        """Estimate the real schedules of the fastest candidates.

        The seconds of the others are scaled by what the estimates of these were longer. While one of them is then the fastest,
        it is estimated, too, up to ``_MORE`` of them.

        Returns:
            The candidates, first those that were estimated, fastest first; and those that turn out not to fit.
        """
        found: list[Candidate] = []
        rejected: list[Rejection] = []
        ratios: list[float] = []
        rest = [*candidates]
        while number and rest and len(found) < number + _MORE:
            ratio = median(ratios) if ratios else 1.0
            if len(found) >= number and rest[0].step_seconds * ratio >= min(each.step_seconds for each in found):
                break
            each = rest.pop(0)
            exact = self._exact(each)
            if isinstance(exact, Rejection):
                rejected.append(exact)
                continue
            found.append(each.with_estimate(exact))
            ratios.append(found[-1].step_seconds / each.step_seconds)
        found.sort(key=lambda each: each.step_seconds)
        return [*found, *(each.with_seconds_times(median(ratios)) if ratios else each for each in rest)], rejected

    def _exact(self, candidate: Candidate) -> Estimate | Rejection:
        settings = candidate.layout._asdict()
        try:
            exact = self.estimate(candidate)
        except SlapoError as err:
            return Rejection(settings, str(err))
        limit = self.hardware.usable_bytes
        if exact.problems:
            return Rejection(settings, exact.problems[0])
        if exact.peak > limit:
            reason = f"its schedule needs {format_bytes(exact.peak)} of {format_bytes(limit)}"
            return Rejection(settings, reason, exact.peak - limit)
        return exact


def _with_policy(record: ModelRecord, full: ModelRecord) -> ModelRecord:
    return replace(record, blocks={**record.blocks, "full": full.blocks["none"]})


def _step_model(target: str) -> type[StepModel]:
    return step_model(create_schedule(nn.Identity()), target)


@contextmanager
def held_messages() -> Iterator[list[str]]:
    """Keep Slapo's messages from the log in a block; yield its warnings."""
    found: list[str] = []

    def hold(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            found.append(record.getMessage())
        return False

    logger = get_logger()
    logger.addFilter(hold)
    try:
        yield found
    finally:
        logger.removeFilter(hold)


def with_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the batch with another number of rows, which repeat.

    Raises:
        SlapoError: no tensor has rows.
    """
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    if not sizes or not sizes[0]:
        raise SlapoError("plan: the batch has no tensor with rows; give the arguments of the forward by name")

    def repeat(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != sizes[0]:
            return value
        value = torch.zeros_like(value, device="cpu") if value.is_meta else value
        return value.repeat(-(-rows // sizes[0]), *[1] * (value.dim() - 1))[:rows]

    return {name: repeat(value) for name, value in batch.items()}
