"""Weights of DeepSpeed's engine by original names, in fp32 if its optimizer keeps an fp32 copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program, shard_spec
from slapo_training.ema import MasterValue, master_values
from slapo_training.model import Piece, buffers, parameters, piece_of

from ..process_state._deepspeed_private import has_fp32_weight
from .local_tensors import Share, Shares


def pieces(model: Any, module: nn.Module, program: Program, zero_stage: int) -> dict[str, Piece]:
    """Return this rank's pieces of the parameters and persistent buffers. Collective over the replicas.

    With stage 3 of ZeRO each replica returns some rows of each parameter, since the model may not fit on one replica.
    """
    held = {} if zero_stage == 3 else {share.name: share for share in Shares(model, module, program).held}
    found = {}
    for name, parameter in parameters(module).items():
        value = _of_stage_3(parameter) if zero_stage == 3 else _value(parameter, held.get(name), program, zero_stage)
        rows = _rows(len(value), program) if zero_stage == 3 and value.dim() else None
        kept = value if rows is None else value[slice(*rows)].clone()
        found[name] = piece_of(kept, shard_spec(parameter), value.shape, rows)
    return {**found, **{name: piece_of(buffer, shard_spec(buffer)) for name, buffer in buffers(module).items()}}


def values(model: Any, module: nn.Module, program: Program) -> Iterator[MasterValue]:
    """Iterate over this rank's ranges of the tensors that DeepSpeed's optimizer steps, and over the buffers."""
    shares = Shares(model, module, program)
    stepped = ((share.name, share.value, share.start) for share in shares.held if share.stepped is not None)
    return master_values(stepped, buffers(module), shares.pieces)


def _value(parameter: torch.Tensor, share: Share | None, program: Program, zero_stage: int) -> torch.Tensor:
    if zero_stage == 0 or not parameter.requires_grad:
        return parameter.detach()
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if share is not None:
        whole.narrow(0, share.start, share.value.numel()).copy_(share.value)
    if program.axis_size("dp") > 1:
        assert program.mesh is not None
        dist.all_reduce(whole, group=program.mesh.get_group("dp"))
    return whole.view(parameter.shape)


def _of_stage_3(parameter: torch.Tensor) -> torch.Tensor:
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    master: torch.Tensor | None = safe_get_full_fp32_param(parameter) if has_fp32_weight(parameter) else None
    if master is not None:
        return master.detach()
    with zero.GatheredParameters([parameter], modifier_rank=None):
        return parameter.detach().clone()


def _rows(rows: int, program: Program) -> tuple[int, int]:
    """Return this replica's range of ``rows`` rows."""
    step = -(-rows // program.axis_size("dp"))
    start = min(program.axis_rank("dp") * step, rows)
    return start, min(start + step, rows)
