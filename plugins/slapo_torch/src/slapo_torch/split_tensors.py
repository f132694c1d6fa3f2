"""Parts of parameters on ranks that need not exist, for estimates of optimizers that step whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from slapo_core import ShardSpec, shard_spec
from slapo_training import StepGroups
from slapo_training.model import Piece, piece_of
from slapo_training.optimizers import SplitTensor, whole_tensors_of

from .fsdp.wrap_policy import can_shard


def split_tensors(parameters: Sequence[nn.Parameter], groups: StepGroups, replicas: int) -> Iterator[SplitTensor]:
    """Yield the parameters of which a rank holds parts: shards of tensor parallelism, rows of FSDP, or both.

    Args:
        parameters: Parameters as the schedule left them, not sharded over replicas.
        groups: Process groups of the rank.
        replicas: Number of replicas that FSDP shards over; 1 for none.
    """
    for each in parameters:
        has_shards, has_rows = _has_shards(each), replicas > 1 and can_shard(each)
        if not (has_shards or has_rows):
            continue
        spec = shard_spec(each)
        axes = (*(("dp",) if has_rows else ()), *(("tp",) if has_shards else ()))
        pieces = [_shard(each, spec, rank) for rank in range(spec.num_shards if spec is not None and has_shards else 1)]
        parts = [_rows(piece, replica, replicas) for replica in range(replicas) for piece in pieces] if has_rows else pieces
        wholes = whole_tensors_of("", each, pieces[0].full_shape, each.dtype)
        shapes = [tuple(part.tensor.shape) for part in parts]
        yield SplitTensor(wholes, [[*part.chunks()] for part in parts], shapes, groups.ranks(*axes))


def has_split(parameters: Iterable[nn.Parameter], replicas: int) -> bool:
    """Return True if a rank holds parts of some parameters; ``replicas`` as in ``split_tensors``."""
    return any(_has_shards(each) or (replicas > 1 and can_shard(each)) for each in parameters)


def _has_shards(parameter: nn.Parameter) -> bool:
    spec = shard_spec(parameter)
    return spec is not None and spec.num_shards > 1


def _shard(parameter: nn.Parameter, spec: ShardSpec | None, rank: int) -> Piece:
    if spec is None or spec.num_shards == 1:
        return piece_of(parameter, None)
    shape = [*spec.full_shape]
    shape[spec.dim] = sum(stop - start for start, stop in spec.ranges(rank))
    return piece_of(torch.empty(shape, dtype=parameter.dtype, device="meta"), replace(spec, rank=rank))


def _rows(piece: Piece, replica: int, replicas: int) -> Piece:
    """Return the rows of a replica's tensor on one replica, as FSDP2 splits them."""
    number = piece.tensor.shape[0]
    step = -(-number // replicas)
    start = min(replica * step, number)
    return piece.rows(start, min(start + step, number))
