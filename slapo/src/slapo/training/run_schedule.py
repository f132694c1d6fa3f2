"""The schedule of a run: from a file, or built from the model's structure."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import Schedule, create_schedule, load_schedule
from slapo_report import format_count
from slapo_tune import RUN_SYMBOLS

from ..run_data.settings import Settings, SettingsError


def schedule_model(model: nn.Module, settings: Settings, mesh: DeviceMesh | None) -> Schedule:
    """Schedule the unmodified model as the settings say.

    Raises:
        SlapoError: the schedule file cannot be read or has a mistake (names file and line), or a step is refused.
    """
    inputs = example_inputs(settings)
    if settings.schedule:
        return load_schedule(model, settings.schedule, config=run_symbols(settings), mesh=mesh, example_inputs=inputs)
    sch = create_schedule(model, mesh=mesh, example_inputs=inputs)
    apply_default_steps(sch, settings)
    return sch


def run_symbols(settings: Settings) -> dict[str, Any]:
    """Return the values of symbols that set the layout and options of a run, for a schedule file with a space."""
    given = {**vars(settings), "pipeline_schedule": settings.schedule_kind}
    return {name: given[name] for name in RUN_SYMBOLS}


def apply_default_steps(sch: Schedule, settings: Settings) -> None:
    """Tensor parallelism by the model's structure, checkpointed layers if asked for, and even pipeline cuts."""
    if settings.tp > 1:
        sch.tensor_parallel(**({"sequence_parallel": True} if settings.sequence_parallel else {}))
    if settings.pp == 1 and not settings.checkpoint_layers:
        return
    layers = find_layers(sch.mod, settings)
    if settings.checkpoint_layers:
        for path in layers:
            sch[path].checkpoint()
    for stage in range(1, settings.stages):
        sch[layers[stage * len(layers) // settings.stages - 1]].cut_pipeline_stage()


def find_layers(model: nn.Module, settings: Settings) -> list[str]:
    """Dotted paths of the model's layers in order: its largest list of at least ``--layers`` modules."""
    lists = [
        (sum(p.numel() for p in module.parameters()), path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= settings.layers
    ]
    if not lists:
        raise SettingsError(
            f"--model {settings.model}: it has no list of {format_count(settings.layers, 'layer')}; "
            "say with --schedule FILE where to cut and what to checkpoint"
        )
    _, path, module = max(lists, key=lambda entry: entry[0])
    return [f"{path}.{index}" for index in range(len(module))]


def example_inputs(settings: Settings) -> dict[str, torch.Tensor]:
    """One micro-batch of one data-parallel rank, in shape."""
    rows = settings.batch // (settings.dp * settings.microbatches)
    ids = torch.zeros(rows, settings.seq, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}
