"""The model of a plan: what was measured of it, the search over its layouts, and the estimates of their schedules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import nn

from slapo_core import SlapoError, create_schedule
from slapo_report import format_bytes
from slapo_training import StepModel

from ..estimation.estimate import estimate, step_model
from ..estimation.result import Estimate
from ..hardware import Hardware
from ..measurement.fake_process_group import fake_ranks
from ..measurement.held_messages import held_messages
from .batch_rows import with_rows
from .candidates import Candidate, candidate_of, replay
from .constraints import contradiction
from .engine_facts import EngineChoices
from .layouts import ContradictionError, Layout, LayoutSpace, ModelForm, Rejection
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
        candidates = self._candidates(space)
        if not candidates and not space.rejected:
            raise ContradictionError(contradiction(space))
        return self._refine_fastest(candidates, space), space.rejected

    def _candidates(self, space: LayoutSpace) -> list[Candidate]:
        """Return the layouts that fit by the costs of their parts, fastest first; the others go to those that are rejected."""
        found: list[Candidate] = []
        for tp in space.degrees():
            for layout in space.layouts(tp):
                cost = self._cost(layout)
                if isinstance(cost, Candidate):
                    found.append(cost)
                elif cost not in space.rejected:
                    space.rejected.append(cost)
        return sorted(found, key=lambda each: each.step_seconds)

    def _refine_fastest(self, candidates: list[Candidate], space: LayoutSpace) -> list[Candidate]:
        """Return the candidates that fit once the fastest are refined, fastest first.

        Pipelines behind those have as much more memory as the refined ones with their schedule needed. Therefore the fastest of
        each schedule is refined, if that needs no further measurement.
        """
        best: list[Candidate] = []
        others: list[Candidate] = []
        forms: set[ModelForm] = set()  # of pipelines whose stages were measured
        growth: dict[str, float] = {}  # of their memory, by pipeline schedule
        for plain in candidates:
            layout, is_enough = plain.layout, len(best) >= _REFINED
            if is_enough and (layout.pp == 1 or layout.form not in forms or layout.pipeline_schedule in growth):
                others.append(plain)
            elif isinstance(refined := self._refine(plain), Rejection):
                space.rejected.append(refined)
                if is_enough:
                    growth[layout.pipeline_schedule] = max(growth.values())
            else:
                best.append(refined)
                if layout.pp > 1:
                    forms.add(layout.form)
                    ratio = refined.peak / plain.peak if refined.policies == plain.policies else 1.0
                    growth[layout.pipeline_schedule] = max(ratio, growth.get(layout.pipeline_schedule, 1.0))
        for plain in others:
            most = max(growth.values(), default=1.0) if plain.layout.pp > 1 else 1.0
            if self._has_equal_blocks and plain.layout.pp > 1:
                most = growth.get(plain.layout.pipeline_schedule, most)
            found = self._with_growth(plain, most)
            (best if isinstance(found, Candidate) else space.rejected).append(found)  # type: ignore[arg-type]
        return sorted(best, key=lambda each: each.step_seconds)

    def _with_growth(self, candidate: Candidate, growth: float) -> Candidate | Rejection:
        """Return a candidate with ``growth`` times the memory, and more recomputation if it is needed then."""
        if growth == 1.0:
            return candidate
        if candidate.peak * growth > self.hardware.usable_bytes:
            return self._cost(candidate.layout, growth=growth)
        stages = tuple(replace(each, peak=round(each.peak * growth)) for each in candidate.stages)
        return replace(candidate, stages=stages)

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

    def _cost(self, layout: Layout, *, refines: bool = False, policy: str = "", growth: float = 1.0) -> Candidate | Rejection:
        facts = self._engine.facts(layout)
        if isinstance(facts, str):
            return Rejection(layout._asdict(), facts)
        record = self._record(layout, cuts=refines and self._has_equal_blocks)
        if isinstance(record, str):
            return Rejection(layout.form._asdict(), record)
        blocks, stages = len(record.paths), sum(map(len, facts.stages.values()))
        if stages > 1 and blocks < stages:  # the forward reads what the lists hold, and does not call it
            settings = {"tp": layout.tp, "pp": layout.pp} if blocks < layout.pp else layout._asdict()
            return Rejection(settings, f"the model has {blocks} blocks to cut between")
        options = self._engine.build_options(layout)
        given = record, layout, facts, self._seconds, options, self.target
        return candidate_of(*given, growth=growth, solves=refines, policy=policy)

    def _refine(self, candidate: Candidate) -> Candidate | Rejection:
        """Return a candidate with policies that are solved for; a pipeline with its order, and the stages of a cut model.

        If blocks differ, stages differ by where the model is cut, and the real schedule is estimated.
        """
        layout = candidate.layout
        found = self._cost(layout, refines=True)
        facts, record = self._engine.facts(layout), self._record(layout, cuts=self._has_equal_blocks)
        if not isinstance(found, Candidate) or isinstance(facts, str) or isinstance(record, str):
            return found
        found = replay(found, record, facts, self._seconds)
        return found if layout.pp == 1 or self._has_equal_blocks else self._with_estimate(found)

    @property
    def _has_equal_blocks(self) -> bool:
        return len(self._trimmed_model.runs) < 2

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
        found = [each for each in candidates if each.is_estimated]
        rejected: list[Rejection] = []
        ratios: list[float] = []
        rest = [each for each in candidates if not each.is_estimated]
        while number and rest and len(ratios) < number + _MORE:
            ratio = median(ratios) if ratios else 1.0
            if len(found) >= number and rest[0].step_seconds * ratio >= min(each.step_seconds for each in found):
                break
            each = rest.pop(0)
            exact = self._with_estimate(each)
            if isinstance(exact, Rejection):
                rejected.append(exact)
                continue
            found.append(exact)
            ratios.append(exact.step_seconds / each.step_seconds)
        found.sort(key=lambda each: each.step_seconds)
        return [*found, *(each.with_seconds_times(median(ratios)) if ratios else each for each in rest)], rejected

    def _with_estimate(self, candidate: Candidate) -> Candidate | Rejection:
        """Return a candidate with the costs of its real schedule; one that does not fit is tried with more recomputation."""
        limit = self.hardware.usable_bytes
        exact = self._exact(candidate)
        if isinstance(exact, Rejection) and exact.missing:
            growth = (limit + exact.missing) / candidate.peak
            tighter = self._cost(candidate.layout, refines=True, growth=growth)
            if isinstance(tighter, Candidate) and tighter.policies != candidate.policies:
                candidate, exact = tighter, self._exact(tighter)
        return exact if isinstance(exact, Rejection) else candidate.with_estimate(exact)

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
