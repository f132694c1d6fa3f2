"""Gradients of tied parameters, for users who run torch's pipeline schedules themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slapo_core import Program

from .stage_runtime import local_stages, pipeline_group


def sum_tied_gradients(program: Program, group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of each tied parameter over the stages that use it; call it before every step of the optimizer.

    Collective: every rank of the pipeline calls it, after the schedule's ``step``. A tied parameter without a gradient on any
    stage gets none.

    Args:
        program: The program whose stages ``build_stage`` made on this rank.
        group: Process group of the pipeline; default: the mesh's axis ``pp``, or all ranks if the program has no mesh.
    """
    named = dict(program.module.named_parameters())
    tied = [(named[next(name for name in tie.names if name in named)], tie.stages) for tie in program.ties]
    trained = [(parameter, stages) for parameter, stages in tied if parameter.requires_grad]
    if not trained:
        return
    group, built = group or pipeline_group(program), local_stages(program)
    held = [
        not built.isdisjoint(stages) for _, stages in trained
    ]  # no optimizer of another rank would ever clear this gradient
    given = [here and parameter.grad is not None for (parameter, _), here in zip(trained, held, strict=True)]
    counts = torch.tensor(given, device=trained[0][0].device, dtype=torch.int32)
    dist.all_reduce(counts, group=group)
    for (parameter, _), here, gives, count in zip(trained, held, given, counts.tolist(), strict=True):
        if count:
            total = parameter.grad.contiguous() if gives and parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(total, group=group)
            parameter.grad = total.detach() if here else parameter.grad
