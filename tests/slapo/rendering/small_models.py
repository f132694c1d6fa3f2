"""Small models whose text is short enough to be written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

import slapo.plugin
import slapo_deepspeed.plugin
import slapo_example.plugin
import slapo_fusion.plugin
import slapo_megatron.plugin
import slapo_memory.plugin
import slapo_models.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
from slapo_testing import isolated_plugins

PLUGINS = (
    slapo.plugin,
    slapo_deepspeed.plugin,
    slapo_example.plugin,
    slapo_fusion.plugin,
    slapo_megatron.plugin,
    slapo_memory.plugin,
    slapo_models.plugin,
    slapo_pipeline.plugin,
    slapo_sharding.plugin,
    slapo_torch.plugin,
    slapo_tracing.plugin,
)


@contextmanager
def rendering_plugins() -> Iterator[None]:
    """Let the default registry hold this repository's plugins, the facade's among them, however they are installed."""
    with isolated_plugins(*PLUGINS):
        yield


class Block(nn.Module):
    """A feed-forward layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.act = nn.GELU()
        self.proj = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.act(self.fc(x)))


class Tied(nn.Module):
    """An embedding whose weight is the head's, and blocks between them."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.h = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.h:
            x = block(x)
        return F.log_softmax(self.head(x), -1)
