"""Gradients of tied parameters, for those who run torch's schedules themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slapo_core import Program

from .stage_runtime import local_stages, pipeline_group


def sum_tied_gradients(program: Program, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of each tied parameter over the stages that use it; to be called before every step of the optimizer.

    Collective: every rank of the pipeline calls it, after the schedule's ``step``. Where no stage gave a tie a gradient it gets
    none.

    Args:
        program: Of which ``build_stage`` made this rank's stages.
        group: The pipeline's ranks; default: those of the mesh's axis ``pp``, or all where the program has no mesh.
    """
    named = dict(program.module.named_parameters())
    tied = [(named[next(name for name in tie.names if name in named)], tie.stages) for tie in program.ties]
    trained = [(parameter, stages) for parameter, stages in tied if parameter.requires_grad]
    if not trained:
        return
    group, built = group or pipeline_group(program), local_stages(program)
    held = [not built.isdisjoint(stages) for _, stages in trained]  # others have no optimizer that would empty a gradient
    given = [here and parameter.grad is not None for (parameter, _), here in zip(trained, held, strict=True)]
    counts = torch.tensor(given, device=trained[0][0].device, dtype=torch.int32)
    dist.all_reduce(counts, group=group)
    for (parameter, _), here, gives, count in zip(trained, held, given, counts.tolist(), strict=True):
        if count:
            total = parameter.grad.contiguous() if gives and parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(total, group=group)
            parameter.grad = total.detach() if here else parameter.grad
