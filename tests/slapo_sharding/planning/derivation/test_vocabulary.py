"""Vocabularies of models that name neither embedding nor head: found in the graph and split over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import build, create_schedule, is_sharded
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc
D, V = 16, 51


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """MLPs between an embedding and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(V, D, padding_idx=0), nn.Embedding(12, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, V, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.hidden(ids))


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(tied=True)

    def forward(self, ids: torch.Tensor) -> Any:
        logits = super().forward(ids)
        return logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Codebooks(Net):
    """Several embeddings and heads, as in audio models."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(V, D) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(D, V) for _ in range(2))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return super().hidden(ids) + sum(table(ids) for table in self.tables)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.hidden(ids)
        return torch.stack([head(x) for head in self.heads]), super().forward(ids)


class ReadWeight(Tied):
    """Model that reads the weight of its embedding as its head."""

    def forward(self, ids: torch.Tensor) -> Any:
        return self.hidden(ids) @ self.words.weight.T, super().forward(ids)


class Again(Net):
    """Model that embeds the ids of its own scores again, so that the head feeds other weights."""

    def forward(self, ids: torch.Tensor) -> Any:
        return self.blocks[0](self.head(self.hidden(ids)).softmax(-1) @ self.words.weight)


class Labels(Net):
    """Model with fewer labels than channels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, D), nn.Linear(D, 8)

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids % 8)


class Handing(Block):
    """Block that passes its hidden values to the next block."""

    def forward(self, x: torch.Tensor, before: Any = 0.0) -> Any:
        hidden = torch.relu(self.up(x)).view(*x.shape[:2], 4 * D) + before
        return self.norm(x + self.down(hidden)), hidden


class OneGraph(Net):
    """Model whose blocks return sharded values, so that it runs from one graph and its vocabulary stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Handing() for _ in range(2))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x, hidden = self.words(ids), 0.0
        for block in self.blocks:
            x, hidden = block(x, hidden)
        return x


SPLIT = {
    OneGraph: set[str](),
    Net: {"words", "head"},
    Tied: {"words", "head"},
    Codebooks: {*(f"tables.{n}" for n in range(2)), *(f"heads.{n}" for n in range(2)), "words", "head"},
    ReadWeight: set[str](),
    Again: set[str](),
    Labels: set[str](),
}


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(length))


def _flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else [each for output in outputs for each in _flat(output)]


def of_kinds(rank: int, kinds: list[type[nn.Module]], sequence_parallel: bool) -> dict[str, set[str]]:
    """Compare outputs and three steps; return the split layers beside the MLP."""
    found = {}
    for kind in kinds:
        expected, model = kind(), kind()
        sch = create_schedule(model, example_inputs=(_ids(2, 8),)).tensor_parallel(sequence_parallel=sequence_parallel)
        build(sch)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (expected, model)]
        for batch, length in ((2, 8), (4, 12), (2, 8)):
            for each, optimizer in zip((expected, model), optimizers, strict=True):
                optimizer.zero_grad()
                sum(value.square().mean() for value in _flat(each(_ids(batch, length)))).backward()
                optimizer.step()
            for value, whole in zip(_flat(model(_ids(3, 4))), _flat(expected(_ids(3, 4))), strict=True):
                torch.testing.assert_close(value, whole, atol=1e-5, rtol=1e-4)
        for name, value in sch.full_state().items():
            torch.testing.assert_close(value, expected.state_dict()[name], atol=1e-5, rtol=1e-4)
        split = {path for path, module in model.named_modules() if any(map(is_sharded, module._parameters.values()))}
        layers = {path for path in split if path.startswith("blocks.")}
        assert len(layers) == 4, kind
        found[kind.__name__] = split - layers
    return found


@pytest.mark.parametrize(
    ("kinds", "sequence_parallel"),
    [
        ([OneGraph, Codebooks, ReadWeight, Again], False),
        ([Net, Tied], True),
        pytest.param([*SPLIT], False, marks=pytest.mark.slow),
    ],
)
def test_embeddings_and_heads_are_split_unless_their_weights_have_other_uses(
    kinds: list[type[nn.Module]], sequence_parallel: bool
) -> None:
    for found in run_distributed(of_kinds, 2, kinds, sequence_parallel, timeout=110):
        assert found == {kind.__name__: SPLIT[kind] for kind in kinds}
