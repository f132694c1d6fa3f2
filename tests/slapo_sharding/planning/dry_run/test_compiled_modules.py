"""``tensor_parallel()`` of a model with modules compiled by ``module.compile()``."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import build, create_schedule, get_logger
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_sharding.planning.dry_run.test_mode_regions import WIDTH, Attention

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

WORDS = 2 * WIDTH
"""More than channels, so that embedding and head are split as a vocabulary is."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def _split(rank: int) -> list[str]:
    """Compare a split model with the unmodified one; return the warnings, without those of the compiler."""
    model, told = Net(), []
    unmodified = copy.deepcopy(model)
    ids, targets = torch.randint(WORDS, (2, 2, 6), generator=torch.Generator().manual_seed(1))
    for block in model.blocks:
        block.mlp.compile(backend="eager")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    for logger in (get_logger(), logging.getLogger("torch._dynamo")):
        logger.addHandler(handler)
    sch = create_schedule(model, example_inputs=(ids, targets))
    sch.tensor_parallel()
    build(sch)
    for _ in range(2):
        assert_equivalent(unmodified, model, ids, targets)
    assert len(model.blocks[0].mlp[0].weight) == 2 * WIDTH
    return told


def test_compiled_modules_are_split_without_a_warning() -> None:
    assert run_distributed(_split, 2, timeout=100) == [[], []]
