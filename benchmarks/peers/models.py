"""The model that engines are compared with, its schedules, and its batches."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from benchmarks.sharding import blocks
from slapo_core import Schedule


class Sizes(NamedTuple):
    """Sizes of the model and of a batch."""

    hidden: int = 256
    heads: int = 8
    layers: int = 6
    vocabulary: int = 1024
    microbatches: int = 4
    rows: int = 4
    sequence: int = 128


RATE, CLIP = 1e-4, 1.0
adamw = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0)
"""Without decay, of which Megatron leaves out vectors."""


class Head(nn.Module):
    """Hidden states to logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden)
        self.logits = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.logits(self.norm(x))
        return found


class Language(nn.Module):
    """Tokens to logits; equal on every rank. Nothing in it knows of engines or ranks."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = blocks(sizes.hidden, sizes.heads, sizes.layers)  # seeds what follows as well
        self.embedding, self.head = nn.Embedding(sizes.vocabulary, sizes.hidden), Head(sizes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch_of(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of all micro-batches of a step."""
    shape = (2, sizes.microbatches * sizes.rows, sizes.sequence)
    tokens, labels = torch.randint(sizes.vocabulary, shape, generator=torch.Generator().manual_seed(1))
    return tokens, labels


def mesh_of(axis: str) -> DeviceMesh:
    """All ranks along one axis."""
    axes = ("pp", "dp", "tp")
    return init_device_mesh("cpu", tuple(dist.get_world_size() if name == axis else 1 for name in axes), mesh_dim_names=axes)


def shard_blocks(schedule: Schedule) -> None:
    """Megatron's layout of a block; embedding and head stay whole."""
    for block in schedule.select("blocks.*"):
        for name in ("qkv", "up"):
            block[name].shard("weight", axis=0, blocks=1).sync("bwd_post", "all_reduce")
        for name in ("proj", "down"):
            block[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def cut_blocks(schedule: Schedule, stages: int, layers: int) -> None:
    """Cut the model into stages with the same number of blocks."""
    for stage in range(1, stages):
        schedule[f"blocks.{stage * layers // stages - 1}"].cut_pipeline_stage()
