"""The weights of DeepSpeed's engine by original names: in fp32 where its optimizer keeps them so."""

from __future__ import annotations

import torch
from torch import nn

from slapo_core.parameters import shard_spec
from slapo_core.program import Program
from slapo_training.model_tensors import buffers, parameters
from slapo_training.pieces import Piece, piece_of


def pieces(module: nn.Module, program: Program, zero_stage: int) -> dict[str, Piece]:
    """What this rank has of the parameters and persistent buffers. Collective over the replicas.

    With stage 3 of ZeRO each replica gets some rows of what it has a part of, as the whole would not fit it.
    """
    found = {}
    for name, parameter in parameters(module).items():
        value = _value(parameter, zero_stage)
        rows = _rows(len(value), program) if zero_stage == 3 and value.dim() else None
        kept = value if rows is None else value[slice(*rows)].clone()
        found[name] = piece_of(kept, shard_spec(parameter), value.shape, rows)
    return {**found, **{name: piece_of(buffer, shard_spec(buffer)) for name, buffer in buffers(module).items()}}


def _value(parameter: torch.Tensor, zero_stage: int) -> torch.Tensor:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    trained = parameter.requires_grad and (zero_stage < 3 or hasattr(parameter, "_z3_optimizer"))
    master: torch.Tensor | None = safe_get_full_fp32_param(parameter) if trained else None
    if master is not None:
        return master.detach()
    if zero_stage < 3:
        return parameter.detach()
    with GatheredParameters([parameter], modifier_rank=None):
        return parameter.detach().clone()


def _rows(rows: int, program: Program) -> tuple[int, int]:
    """This replica's of so many rows."""
    step = -(-rows // program.axis_size("dp"))
    start = min(program.axis_rank("dp") * step, rows)
    return start, min(start + step, rows)
