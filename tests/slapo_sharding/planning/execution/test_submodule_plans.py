"""Models that cannot be graphs, as a whole or in some modules: their submodules are split one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import build, create_schedule, is_sharded
from slapo_testing import run_distributed
from tests.slapo_sharding.handwritten import SPLIT, D, GatedMlp
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_sharding.planning.local_sizes.test_handwritten import BATCHES, SGD

pytestmark = pytest.mark.multiproc


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(D), SPLIT["SplitByWidth"](), GatedMlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, D), nn.Linear(D, 64)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), tokens.flatten())


class Logging(Model):
    """Model that stores losses as Python numbers, and its last logits."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens)
        self.losses.append(loss.item())
        self.last = loss
        return loss


class Matching(Model):
    """Model that weights its loss by a NumPy result of the logits, as a Hungarian matching does."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.logits(tokens)
        order = torch.from_numpy(np.argsort(logits.detach().mean(-1).numpy(), axis=1).copy())
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(order)
        return (losses * (1 + order)).mean()


class Exits(Model):
    """Model that stops at a block that is good enough."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, losses = self.embedding(tokens), []
        for block in self.blocks:
            x = block(x)
            losses.append(F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()))
            if losses[-1] < 1e-3:
                break
        return torch.stack(losses).mean()


class Measuring(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x.std()))
        return super().forward(x)


class MeasuringModel(Model):
    """Model whose blocks store a statistic of their inputs."""

    block = Measuring


class Experts(nn.Module):
    """Experts that store their balance loss for the model."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        self.balance = shares.mean((0, 1)).square().sum()
        return sum(shares[..., index, None] * expert(x) for index, expert in enumerate(self.experts))


class ExpertBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()


class Balanced(Model):
    """Model that adds the balance losses stored by its blocks."""

    block = ExpertBlock

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens)
        return loss + 0.1 * sum(block.mlp.balance for block in self.blocks)


KINDS = {kind.__name__: kind for kind in (Logging, Matching, Exits, MeasuringModel, Balanced)}
PLANNED = ("MeasuringModel", "Balanced")
"""Models with a plan as a whole, apart from blocks in them."""


def trains(rank: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Compare three steps; return the layers of the blocks that stay whole, and the warnings."""
    found = {}
    for kind in kinds:
        torch.manual_seed(0)
        expected = KINDS[kind]()
        torch.manual_seed(0)
        sch = create_schedule(KINDS[kind](), example_inputs=(BATCHES[0],))
        with warnings_told() as told:
            sch.tensor_parallel()
        engine, optimizer = build(sch, "torch", optimizer=SGD), SGD(expected.parameters())
        for batch in BATCHES:
            loss = expected(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert float(engine.train_batch(batch)) == pytest.approx(loss.item(), abs=1e-5), kind
        for name, value in sch.full_state().items():
            torch.testing.assert_close(value, expected.get_parameter(name).detach(), atol=1e-5, rtol=1e-4)
        engine.close()
        layers = [(path, each) for path, each in sch.mod.blocks.named_modules() if isinstance(each, nn.Linear)]
        found[kind] = sorted(path for path, each in layers if not is_sharded(each.weight)), list(told)
    return found


@pytest.mark.parametrize("kinds", [("Exits", "Balanced"), pytest.param(tuple(KINDS), marks=pytest.mark.slow)], ids=str)
def test_submodules_of_models_that_cannot_be_graphs_are_split(kinds: tuple[str, ...]) -> None:
    for found in run_distributed(trains, 2, kinds, timeout=110):
        for kind, (whole, told) in found.items():
            assert whole == (["0.mlp.gate", "1.mlp.gate"] if kind == "Balanced" else []), kind
            expected = f"tensor_parallel: the submodules of {kind} are split one by one, as there is no plan for the whole: "
            assert [each.startswith(expected) for each in told] == [True] * (kind not in PLANNED), told


class Alone(nn.Module):
    """Unrepeated module that stores a number, with layers that make no pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.seen = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = float(x.std())
        return self.second(self.norm(self.first(x).softmax(1)))


class WithAlone(Model):
    def __init__(self) -> None:
        super().__init__()
        self.alone = Alone()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.alone(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def alone(rank: int) -> list[str]:
    sch = create_schedule(WithAlone(), example_inputs=(BATCHES[0],))
    with warnings_told() as told:
        sch.tensor_parallel()
    assert is_sharded(sch.mod.blocks[1].attn.c_attn.weight)
    assert not any(map(is_sharded, sch.mod.alone.parameters()))
    return list(told)


def test_an_unrepeated_module_is_named_too() -> None:
    start = "tensor_parallel: alone stays whole on every rank: "
    for told in run_distributed(alone, 2):
        assert [each.startswith(start) and "asks for the values of a tensor" in each for each in told] == [True], told
