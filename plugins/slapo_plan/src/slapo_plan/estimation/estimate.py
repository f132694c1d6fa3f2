"""``slapo.estimate``: memory, traffic and operations of one step of a schedule as it stands."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from slapo_core import BuildPlan, Program, Schedule, ScheduleError, SlapoError
from slapo_training import StepFacts, StepGroups, StepModel

from ..hardware import Hardware
from ..measurement.model_errors import model_errors
from ..measurement.random_states import tracked_random_states
from ..measurement.stage_record import StageRecord
from ..recording.storage_tracker import storage_bytes
from ..records import CollectiveRecord
from .engine_rank_memory import engine_rank_memory
from .process_groups import MeshGroups
from .rank_memory import RankPlaces, rank_memory
from .rank_work import first_pass_collectives, main_dtype, model_flops, rank_collectives, rank_flops
from .result import Estimate, RankEstimate
from .stage_records import stage_records
from .step_time import step_time
from .traffic import StepTraffic


def estimate(
    sch: Schedule,
    batch: Mapping[str, Any],
    target: str = "torch",
    *,
    hardware: str | PathLike[str] | Hardware | None = None,
    **options: Any,
) -> Estimate:
    """Estimate one training step of a schedule as it stands: the schedule does not change, and nothing is sent.

    Weights may be on meta, and the ranks of the mesh may be fake, see ``fake_ranks``. Activations are counted from a run of the
    model on fake tensors, forward and backward.

    Args:
        sch: Any handle of the schedule.
        batch: Arguments of the forward for one data-parallel rank, by name, as for ``engine.train_batch``; tensors on
            meta count as zeros.
        target: Name of an installed dialect.
        hardware: Name or path of a hardware file, or a ``Hardware``, for seconds; None for none.
        **options: Options of ``build``, e.g. ``microbatches`` and ``precision``. ``optimizer`` is ``torch.optim.AdamW`` by
            default.

    Returns:
        The estimate; its ``problems`` say why a step cannot run.

    Raises:
        UnknownNameError: no such target.
        ScheduleError: the target gives no facts about its steps, or the model does not run on fake tensors.
    """
    model = step_model(sch, target)
    if (named := model.named_optimizer(options)) is None:
        options.setdefault("optimizer", torch.optim.AdamW)
    if not isinstance(batch, Mapping):
        what = f"the batch is a {type(batch).__name__}; give the arguments of the forward by name, {{name: tensor}}"
        raise ScheduleError(what, primitive="estimate")
    batch = tree_map_only(torch.Tensor, _with_values, dict(batch))
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
    optimizer = named or optimizer_factory(options["optimizer"])
    split = {stage for row in order.values() for kind, stage, _ in row if kind == "I"}
    with runner.weights(), tracked_random_states(), model_errors("estimate"):
        planned = runner.plan(program, parts[0])
        records = stage_records(planned, runner, parts[0], optimizer, split, len(parts))
    rules = model.memory_rules(options, len(program.stages), layout["pp"], layout["dp"])
    nbytes = _input_bytes(batch, sch.example_inputs)
    cluster = hardware if hardware is None or isinstance(hardware, Hardware) else Hardware.load(hardware)
    traffic = StepTraffic(MeshGroups(program.mesh), cluster)
    ranks, collectives = [], []
    others: dict[int, list[CollectiveRecord]] = {}
    for rank in range(layout["pp"]):
        own = {index: records[index] for index in range(len(records)) if program.rank_of(index) == rank}
        if any(each.step is not None for each in own.values()):
            memory = engine_rank_memory(own, order[rank], rules, len(parts), nbytes)
        else:
            memory = rank_memory(own, order[rank], rules, len(parts), nbytes, _places(program, rank, own, rules.tie_bucket))
        ranks.append(RankEstimate(rank, layout["dp"] * layout["tp"], tuple(own), memory, rank_flops(own, order[rank])))
        arrivals = [each for index in reversed(own) for each in own[index].arrivals]
        unused = sum(each.unused for each in records)
        facts = StepFacts(planned.stages, order[rank], arrivals, unused)
        first = first_pass_collectives(own, order[rank]) if runner.repeats_forward else []
        loss = runner.loss_collectives if len(records) - 1 in own else ()
        others[rank] = [*first, *loss, *model.collectives(program, options, rank, facts)]
        collectives += traffic.add(rank, rank_collectives(own, order[rank], others[rank]))
    notes = [*(note for each in records for note in each.notes), *model.notes(program, options), *traffic.notes()]
    found = Estimate(
        **about,
        ranks=ranks,
        collectives=collectives,
        links=traffic.links(),
        traffic=traffic.matrix(),
        notes=[*dict.fromkeys(notes)],
        model_flops=model_flops(program, records, order),
        dtype=main_dtype(each.forward for each in records),
    )
    if cluster is None:
        return found
    return replace(found, hardware=cluster, time=step_time(program, records, order, others, model, options, cluster))


def step_model(sch: Schedule, target: str) -> type[StepModel]:
    """Return the step model of a target.

    Raises:
        UnknownNameError: no such target.
        ScheduleError: it has none.
    """
    found: Any = sch.registry.get("dialect", target).classes.get("step_model")
    if found is None:
        raise ScheduleError(f"target {target!r} gives no facts about its steps; estimate for 'torch'", primitive="estimate")
    return found  # type: ignore[no-any-return]


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros in place of a tensor on meta; labels are counted by their values."""
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor


def _input_bytes(batch: Mapping[str, Any], example_inputs: Any) -> int:
    """Return the bytes of a batch and of the example inputs, which live as long as the schedule."""
    leaves = tree_leaves([dict(batch), example_inputs])
    return storage_bytes(each for each in leaves if isinstance(each, torch.Tensor))


def _axis_size(sch: Schedule, axis: str) -> int:
    mesh = sch.mesh
    return mesh.get_group(axis).size() if mesh is not None and axis in (mesh.mesh_dim_names or ()) else 1


def optimizer_factory(optimizer: Any) -> Any:
    """Return a factory of optimizers like the given one, or the given factory."""
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, defaults = type(optimizer), optimizer.defaults
        return lambda parameters: kind(parameters, **defaults)
    return optimizer


def _places(program: Program, rank: int, records: Mapping[int, StageRecord], tie_bucket: int) -> RankPlaces:
    """Return what the stages of a rank share: tied parameters, and tensors between neighbours."""
    named = dict(program.module.named_parameters(remove_duplicate=False))
    repeated: Counter[int] = Counter()
    for tie in program.ties if len(program.stages) > 1 else ():
        for stage in sorted(set(tie.stages) & records.keys())[:-1]:  # the backward reaches the last one first
            held = sum(each.nbytes for each in program.stages[stage].module.parameters())
            repeated[stage] += round(named[tie.names[0]].nbytes * records[stage].parameters / held)  # rows only with FSDP
    own = [each for stage in records for each in program.stages[stage].module.buffers()]
    others = storage_bytes([*own, *program.module.buffers()]) - storage_bytes(own)
    passes_on = frozenset(stage for stage in records if stage + 1 in records)
    return RankPlaces(repeated, passes_on, others, _tie_copies(program, rank, records, tie_bucket) if tie_bucket else 0)


def _tie_copies(program: Program, rank: int, records: Mapping[int, StageRecord], bucket: int) -> int:
    """Return the bytes of copies of tied gradients: one from each rank that shares them, and the sum of one bucket."""
    sizes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for parameter, ranks in StepGroups(program, rank).ties():
        sizes[ranks].append(parameter.nbytes)
    held = sum(each.nbytes for stage in records for each in program.stages[stage].module.parameters())
    share = sum(each.parameters for each in records.values()) / max(1, held)  # rows only with FSDP
    copies = sum(len(ranks) * sum(own) for ranks, own in sizes.items())
    sums = [max(*own, min(sum(own), bucket)) * (1 if len(ranks) == 2 else 2) for ranks, own in sizes.items()]
    return round(share * (copies + max(sums, default=0)))
