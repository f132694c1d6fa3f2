"""``slapo.plan``: the layouts that fit, the fastest first, and why the others are not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import nn

from slapo_core import BuildPlan, SlapoError, create_schedule, get_logger

from ..estimation.estimate import estimate, optimizer_factory, step_model
from ..estimation.result import Estimate
from ..hardware import Hardware
from ..measurement.fake_process_group import fake_ranks
from ..measurement.model_errors import model_errors
from ..measurement.random_states import tracked_random_states
from .candidates import Candidate, candidate_of
from .layouts import Layout, LayoutSpace, Rejection, check_constraints
from .model_record import ModelRecord, record_model, trimmed_copy
from .stage_costs import PartSeconds

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Plan:
    """Layouts of a model on a cluster, fastest first.

    Args:
        candidates: Layouts that fit, by predicted step time.
        rejected: Layouts that do not, with reasons.
        hardware: The cluster.
        notes: What a schedule leaves whole, and the exact memory of the best.
    """

    candidates: list[Candidate]
    rejected: list[Rejection]
    hardware: Hardware
    notes: list[str] = field(default_factory=list)
    _source: _Source | None = None

    @property
    def best(self) -> Candidate:
        """The fastest layout.

        Raises:
            SlapoError: none fits; says by how much the smallest misses.
        """
        if not self.candidates:
            reasons = "; ".join(map(str, self.rejected[:3])) or "the constraints leave no layout"
            raise SlapoError(f"plan: no layout fits {self.hardware.name}: {reasons}")
        return self.candidates[0]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def explain(self, **settings: Any) -> list[Candidate | Rejection]:
        """Return the candidates and rejections of the layouts with these settings, e.g. ``tp=8, pp=4``.

        Raises:
            UnknownNameError: no such setting.
        """
        wanted = check_constraints(settings)
        found: list[Candidate | Rejection] = [
            each for each in self.candidates if all(getattr(each.layout, name) in values for name, values in wanted.items())
        ]
        words = [f"{name}={values[0]}" for name, values in wanted.items() if name in ("tp", "pp", "dp")]
        named = [each for each in self.rejected if all(word in each.what.split() for word in words)]
        return [*found, *named]

    def mesh(self, candidate: Candidate | None = None) -> Any:
        """Return the device mesh of a candidate, by default the best, on the ranks of this job. Collective."""
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  costs half a second

        layout = (candidate or self.best).layout
        sizes = (layout.pp, layout.dp, layout.tp)
        return init_device_mesh(self.hardware.device_type, sizes, mesh_dim_names=("pp", "dp", "tp"))

    def estimate(self, candidate: Candidate | None = None) -> Estimate:
        """Return the estimate of a candidate's real schedule, by default the best: exact in memory and traffic."""
        assert self._source is not None
        return self._source.estimate(candidate or self.best)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        found = [
            {
                **each.settings,
                "step_seconds": each.step_seconds,
                "peak_bytes": each.peak,
                "bubble": each.bubble,
                "mfu": each.mfu,
            }
            for each in self.candidates
        ]
        rejected = [each._asdict() for each in self.rejected]
        return {"hardware": self.hardware.name, "candidates": found, "rejected": rejected, "notes": [*self.notes]}

    def __str__(self) -> str:
        lines = [f"{index}. {each}" for index, each in enumerate(self.candidates[:10], 1)]
        if len(self.candidates) > 1:
            lines.insert(1, f"   {_advantage(*self.candidates[:2])}")
        lines += [f"note: {note}" for note in self.notes]
        if not self.candidates:
            lines.append("no layout fits")
        shown = self.rejected[:5]
        lines += [f"not: {each}" for each in shown]
        if len(self.rejected) > len(shown):
            lines.append(f"and {len(self.rejected) - len(shown)} more that do not fit")
        return "\n".join(lines)


def plan(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    ranks: int,
    global_batch: int,
    hardware: str | PathLike[str] | Hardware = "this-machine",
    constraints: Mapping[str, Any] | None = None,
    check: int = 1,
    target: str = "torch",
    **options: Any,
) -> Plan:
    """Search the layouts of a model: tensor, pipeline and data parallelism, micro-batches, and recomputation.

    The model is not changed. Its weights may be on meta. Each degree of tensor parallelism is measured once, with few of the
    equal blocks; no rank has to exist.

    Args:
        model: The unmodified model.
        batch: Arguments of its forward by name, with rows in dimension 0; any number of rows.
        ranks: Number of devices.
        global_batch: Rows of a step over all replicas.
        hardware: Name or path of a hardware file, or a ``Hardware``.
        constraints: Allowed values of ``tp``, ``pp``, ``dp``, ``rows``, ``microbatches``, ``sequence_parallel``,
            ``data_parallel`` and ``pipeline_schedule``; a value or a list.
        check: Number of best candidates whose real schedule is estimated; those that do not fit are rejected.
        target: Name of an installed dialect.
        **options: Further options of ``build``, e.g. ``precision="bf16"``.

    Raises:
        UnknownNameError: no such hardware, target or constraint.
        SlapoError: constraints contradict each other, or the model does not run on fake tensors.
    """
    cluster = hardware if isinstance(hardware, Hardware) else Hardware.load(hardware)
    source = _Source(model, batch, target, options, cluster.for_job(ranks))
    allowed = check_constraints(constraints or {})
    found = source.search(ranks, global_batch, allowed)
    source.check_best(found, check)
    return found


class _Source:
    """The model of a plan, with what was measured of it."""

    def __init__(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], target: str, options: Mapping[str, Any], hardware: Hardware
    ) -> None:
        self.model, self.batch, self.target, self.hardware = model, batch, target, hardware
        self.options = {"optimizer": torch.optim.AdamW, **options}
        self.shown = {name: value for name, value in options.items() if isinstance(value, (bool, int, float, str))}
        self._records: dict[tuple[int, bool], tuple[ModelRecord, ModelRecord] | str] = {}
        self.notes: list[str] = []
        self._by_rows: dict[tuple[int, bool], dict[int, ModelRecord]] = {}

    def search(self, ranks: int, global_batch: int, constraints: Mapping[str, tuple[Any, ...]]) -> Plan:
        with trimmed_copy(self.model) as (_, runs):
            blocks = sum(len(paths) for _, paths in runs)
        space = LayoutSpace(ranks, global_batch, blocks, self.hardware.devices_per_node, constraints)
        seconds = PartSeconds(self.hardware)
        candidates: list[Candidate] = []
        rejected = space.rejected
        dtype = _DTYPES.get(str(self.options.get("precision", "fp32")), torch.float32)
        for tp in space.degrees():
            for layout in space.layouts(tp):
                record = self.record(layout)
                if isinstance(record, str):
                    reason = Rejection(f"tp={tp}" + " sequence parallel" * layout.sequence_parallel, record)
                    rejected += [reason] if reason not in rejected else []
                    continue
                result = candidate_of(record, layout, seconds, self.shown, dtype)
                if isinstance(result, Candidate):
                    candidates.append(result)
                else:
                    rejected.append(result)
        candidates.sort(key=lambda each: each.step_seconds)
        return Plan(candidates, rejected, self.hardware, [*dict.fromkeys(self.notes)], _source=self)

    def record(self, layout: Layout) -> ModelRecord | str:
        """Return the model for a layout's rows and tensor-parallel ranks, or why it cannot be measured."""
        key = layout.tp, layout.sequence_parallel
        if key not in self._records:
            try:
                with _held_messages() as held:
                    self._records[key] = self._measure(*key)
                self.notes += [f"tp={layout.tp}: {message}" for message in held]
            except SlapoError as err:
                if key == (1, False):
                    raise
                self._records[key] = str(err)
        pair = self._records[key]
        if isinstance(pair, str):
            return pair
        of_rows = self._by_rows.setdefault(key, {})
        if layout.rows not in of_rows:
            of_rows[layout.rows] = pair[0].at(layout.rows, pair[1], 2)
        return of_rows[layout.rows]

    def _measure(self, tp: int, sequence_parallel: bool) -> tuple[ModelRecord, ModelRecord]:
        """Return the model for one row and for two."""
        batch = _with_rows(self.batch, 1)
        options = {**self.options, "microbatches": 1, "check": False}
        with tracked_random_states(), trimmed_copy(self.model) as (model, runs), fake_ranks(tp=tp) as mesh:
            sch = create_schedule(model, mesh=mesh, example_inputs=batch)
            if tp > 1:
                sch.tensor_parallel(**({"sequence_parallel": True} if sequence_parallel else {}))
            program = BuildPlan.of(sch, self.target, **options).program
            runner = step_model(sch, self.target).stage_runner(program, options)
            factory = optimizer_factory(self.options["optimizer"])
            parts = [runner.split(_with_rows(self.batch, rows))[0] for rows in (1, 2)]
            with model_errors("plan"):
                one, two = record_model(sch, parts, lambda given: runner.run(program, 0, (), dict(given)), factory, runs)
            return one, two

    def estimate(self, candidate: Candidate) -> Estimate:
        layout = candidate.layout
        batch = _with_rows(self.batch, layout.rows * layout.microbatches)
        with _held_messages(), fake_ranks(pp=layout.pp, dp=layout.dp, tp=layout.tp) as mesh:
            model = copy.deepcopy(self.model)
            sch = create_schedule(model, mesh=mesh, example_inputs=_with_rows(self.batch, layout.rows))
            candidate.apply(sch)
            return estimate(sch, batch, self.target, **{**self.options, **candidate.build_options})

    def check_best(self, found: Plan, number: int) -> None:
        """Estimate the real schedules of the best candidates; reject those that do not fit."""
        checked = 0
        while found.candidates and checked < number:
            best = found.candidates[checked]
            try:
                exact = self.estimate(best)
                problem = exact.problems[0] if exact.problems else ""
            except SlapoError as err:
                exact, problem = None, str(err)
            limit = self.hardware.usable_bytes
            if exact is not None and not problem and exact.peak > limit:
                problem = f"its schedule needs {exact.peak / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB"
            if problem:
                found.rejected.append(Rejection(str(best.layout), problem))
                found.candidates.pop(checked)
                continue
            assert exact is not None
            found.notes.append(f"estimated the schedule of {best.layout}: {exact.peak / 2**30:.2f} GiB on the fullest rank")
            checked += 1


@contextmanager
def _held_messages() -> Iterator[list[str]]:
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


def _with_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the batch with another number of rows, which repeat."""
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    if not sizes:
        raise SlapoError("plan: the batch has no tensor with rows; give the arguments of the forward by name")

    def repeat(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != sizes[0]:
            return value
        value = torch.zeros_like(value, device="cpu") if value.is_meta else value
        return value.repeat(-(-rows // sizes[0]), *[1] * (value.dim() - 1))[:rows]

    return {name: repeat(value) for name, value in batch.items()}


def _advantage(best: Candidate, other: Candidate) -> str:
    """Return why the best is faster than the next, in a clause."""
    gains = {
        "less waiting in the pipeline": other.bubble * other.step_seconds - best.bubble * best.step_seconds,
        "less recomputation and faster passes": _passes(other) - _passes(best),
        "less exposed reduction and optimizer": _after(other) - _after(best),
    }
    name = max(gains, key=lambda each: gains[each])
    return f"{other.step_seconds / best.step_seconds - 1:.1%} faster than the next: {name}"


def _passes(candidate: Candidate) -> float:
    seconds = sum(each.forward + each.backward for each in candidate.stages)
    return candidate.layout.microbatches * seconds / len(candidate.stages)


def _after(candidate: Candidate) -> float:
    return max(each.after for each in candidate.stages)
