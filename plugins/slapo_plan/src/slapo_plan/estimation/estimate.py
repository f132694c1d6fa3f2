"""``slapo.estimate``: memory, traffic and operations of one step of a schedule as it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import BuildPlan, Program, Schedule, ScheduleError, SlapoError
from slapo_training import PipelineAction, StepModel

from ..measurement.stage_run import StageRecord
from ..measurement.storage_tracker import storage_bytes
from ..records import CollectiveRecord, OperatorRecord
from .rank_memory import rank_memory
from .result import CollectiveTotal, Estimate, RankEstimate
from .stage_records import stage_records


def estimate(sch: Schedule, batch: Mapping[str, Any], target: str = "torch", **options: Any) -> Estimate:
    """Estimate one training step of a schedule as it stands: the schedule does not change, and nothing is sent.

    Weights may be on meta, and the ranks of the mesh may be fake, see ``fake_ranks``. Activations are counted from a run of the
    model on fake tensors, forward and backward.

    Args:
        sch: Any handle of the schedule.
        batch: Arguments of the forward for one data-parallel rank, by name, as for ``engine.train_batch``.
        target: Name of an installed dialect.
        **options: Options of ``build``, e.g. ``microbatches`` and ``precision``. ``optimizer`` is ``torch.optim.AdamW`` by
            default.

    Returns:
        The estimate; its ``problems`` say why a step cannot run.

    Raises:
        UnknownNameError: no such target.
        ScheduleError: the target gives no facts about its steps, or the model does not run on fake tensors.
    """
    model = _step_model(sch, target)
    if (named := model.named_optimizer(options)) is None:
        options.setdefault("optimizer", torch.optim.AdamW)
    settings = {name: value for name, value in options.items() if isinstance(value, (bool, int, float, str))}
    layout = {axis: _axis_size(sch, axis) for axis in ("pp", "dp", "tp")}
    about: dict[str, Any] = {"model": sch._root.model, "target": target, "layout": layout, "settings": settings}
    try:
        program = BuildPlan.of(sch, target, **{"check": False, **options}).program
        runner = model.stage_runner(program, options)
        parts = runner.split(batch)
        order = model.action_order(options, len(program.stages), layout["pp"], len(parts))
    except SlapoError as err:
        return Estimate(**about, problems=[str(err)])
    with runner.weights():
        planned = program.replan(True, parts[0]) if program.replan is not None else program
        records = stage_records(planned, runner, parts[0], named or _factory(options["optimizer"]), len(parts))
    rules = model.memory_rules(program, options)
    nbytes = storage_bytes(each for each in batch.values() if isinstance(each, torch.Tensor))
    ranks, collectives = [], []
    for rank in range(layout["pp"]):
        own = {index: records[index] for index in range(len(records)) if program.rank_of(index) == rank}
        memory = rank_memory(own, order[rank], rules, len(parts), nbytes)
        ranks.append(RankEstimate(rank, layout["dp"] * layout["tp"], tuple(own), memory, _flops(own, order[rank])))
        collectives += _collectives(program, rank, own, order[rank])
    return Estimate(**about, ranks=ranks, collectives=collectives)


def _step_model(sch: Schedule, target: str) -> type[StepModel]:
    found: Any = sch.registry.get("dialect", target).classes.get("step_model")
    if found is None:
        raise ScheduleError(f"target {target!r} gives no facts about its steps; estimate for 'torch'", primitive="estimate")
    return found  # type: ignore[no-any-return]


def _axis_size(sch: Schedule, axis: str) -> int:
    mesh = sch.mesh
    return mesh.get_group(axis).size() if mesh is not None and axis in (mesh.mesh_dim_names or ()) else 1


def _factory(optimizer: Any) -> Any:
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, defaults = type(optimizer), optimizer.defaults
        return lambda parameters: kind(parameters, **defaults)
    return optimizer


def _passes(records: Mapping[int, StageRecord], order: Sequence[PipelineAction]) -> Any:
    """Iterate over the work of all actions; the parts of a split backward count as one."""
    for kind, index, _ in order:
        if kind == "F":
            yield records[index].forward.work
        elif kind in "BI":
            yield records[index].next_backward.work


def _flops(records: Mapping[int, StageRecord], order: Sequence[PipelineAction]) -> int:
    counts = Counter(map(id, (passes := [*_passes(records, order)])))
    flops = {id(work): sum(each.flops for each in work if isinstance(each, OperatorRecord)) for work in passes}
    return sum(flops[key] * count for key, count in counts.items())


def _collectives(
    program: Program, rank: int, records: Mapping[int, StageRecord], order: Sequence[PipelineAction]
) -> list[CollectiveTotal]:
    found: Counter[tuple[str, str, int]] = Counter()
    for work in _passes(records, order):
        for each in work:
            if isinstance(each, CollectiveRecord):
                found[each.kind, _axis(program, each.ranks), each.nbytes] += 1
    return [CollectiveTotal(*key, count, rank) for key, count in found.items()]


def _axis(program: Program, ranks: tuple[int, ...]) -> str:
    mesh = program.mesh
    for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
        if mesh is not None and tuple(dist.get_process_group_ranks(mesh.get_group(axis))) == ranks:
            return axis
    return f"ranks {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}"
