"""Gradients of tied parameters, for those who run torch's schedules themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slapo_core.program import Program

from .stage_runtime import pipeline_group


def sum_tied_gradients(program: Program, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of each tied parameter over the stages that use it; to be called before every step of the optimizer.

    Collective: every rank of the pipeline calls it, after the schedule's ``step``. Where no stage gave a tie a gradient it gets
    none.

    Args:
        program: Of which ``build_stage`` made this rank's stages.
        group: The pipeline's ranks; default: those of the mesh's axis ``pp``, or all where the program has no mesh.
    """
    named = dict(program.module.named_parameters())
    tied = [named[next(name for name in tie.names if name in named)] for tie in program.ties]
    trained = [parameter for parameter in tied if parameter.requires_grad]
    if not trained:
        return
    group = group or pipeline_group(program)
    counts = torch.tensor([parameter.grad is not None for parameter in trained], device=trained[0].device, dtype=torch.int32)
    dist.all_reduce(counts, group=group)
    for parameter, count in zip(trained, counts.tolist(), strict=True):
        if count:
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            dist.all_reduce(total, group=group)
            parameter.grad = total.detach()
