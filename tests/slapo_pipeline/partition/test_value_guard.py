"""Forwards that ask for values of their batch, as people write them; the stages are those of each batch's own answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import TraceError, build_program

from ..stage_comparison import assert_same, cut, expected_of, loss_of

IMAGE = 15


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.table, self.head = nn.Linear(4, 8), nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))


class Images(Parts):
    """Checks how many images there are, puts them into rows of zeros, cuts off padding and notes the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, patches: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.table(ids)
        if patches is not None:
            features, mask = self.vision(patches), ids == IMAGE
            if mask.sum() != len(features):
                raise ValueError("numbers of images differ")
            full = torch.zeros(*ids.shape, 8)
            full[mask] = features
            x = torch.where(mask[..., None], full, x)
            self.seen = mask.sum(1)
        length = int((ids > 0).sum(1).max())
        x = x[:, :length]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, :length].flatten()), "logits": logits}


class Packed(Parts):
    """Reads the lengths of packed documents, and only the columns of the labels that occur."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        assert lengths.sum().item() == ids.shape[1]
        position = torch.cat([torch.arange(length) for length in lengths.tolist()])
        x = self.table(ids) + torch.sin(position)[None, :, None]
        for block in self.blocks:
            x = block(x)
        documents = torch.stack([part.mean(1) for part in x.split(lengths.tolist(), 1)], 1)
        logits = self.head(documents)[..., torch.unique(labels)]
        return {"loss": logits.logsumexp(-1).mean() if labels.max() > 14 else logits.pow(2).mean()}


def images(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, IMAGE, (2, 6), generator=generator)
    ids[:, 6 - number % 2 :] = 0
    counts = [[1, 2], [2, 0], [0, 3], [3, 3], [0, 0]][number]
    for row, count in zip(ids, counts, strict=True):
        row[:count] = IMAGE
    batch = {"ids": ids, "labels": torch.randint(0, 16, (2, 6), generator=generator)}
    return {**batch, "patches": torch.randn(sum(counts), 4, generator=generator)} if any(counts) else batch


def packed(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.tensor([[4, 6], [5, 5], [4, 6], [1, 9], [9, 1]][number])
    labels = torch.randint(0, 12 + number, (3,), generator=generator)
    return {"ids": torch.randint(0, 16, (1, 10), generator=generator), "lengths": lengths, "labels": labels}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "batch_of"), [(Images, images), (Packed, packed)])
def test_each_batch_has_its_own_answers(kind: type[Parts], batch_of: Callable[[int], dict[str, torch.Tensor]]) -> None:
    model = kind().train()
    program = build_program(cut(model, batch_of(0), "blocks.0"))
    for number in (0, 1, 2, 3, 4, 0):
        batch = batch_of(number)
        expected = expected_of(model, batch)
        found = program(**batch)
        assert_same(found, expected.outputs, "outputs")
        loss_of(found).backward()
        assert_same({name: each.grad for name, each in model.named_parameters()}, expected.gradients, "gradients")
        model.zero_grad()


def test_a_batch_that_the_model_refuses_is_refused() -> None:
    batch = images(0)
    program = build_program(cut(Images(), batch, "blocks.0"))
    batch["ids"][0, 3] = IMAGE
    with pytest.raises(TraceError, match="ValueError: numbers of images differ"):
        program(**batch)


def test_stages_made_for_other_answers_do_not_run() -> None:
    batch, program = packed(0), build_program(cut(Packed(), packed(0), "blocks.0"))
    batch["lengths"] = torch.tensor([5, 5])
    with pytest.raises(TraceError, match=r"the forward asks for tolist, which is \[5, 5\] in this call, traced as \[4, 6\]"):
        program.stages[0].module(**{name: batch[name] for name in program.stages[0].batch_inputs})


def test_questions_for_hidden_states_are_refused() -> None:
    class Gated(Parts):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.table(ids))
            return self.head(self.blocks[1](x) if x.mean() > 0 else x).sum()

    with pytest.raises(TraceError, match=r"asks for the values of a tensor \(bool\), so what it does depends on the data"):
        build_program(cut(Gated(), {"ids": torch.arange(6)[None]}, "blocks.0"))


def test_a_function_under_vmap_gets_what_it_captures_in_each_call() -> None:
    class Mapped(Parts):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, kept = self.blocks[0](self.table(ids)), (ids > 3).float()
            mask = torch.vmap(lambda row, column: row * kept[0] + column)(torch.ones(4, 6), torch.ones(4))
            return self.head(self.blocks[1](x) * mask.mean() * (1 if ids.sum() > 0 else 2)).sum()

    model = Mapped()
    program = build_program(cut(model, {"ids": torch.arange(6)[None]}, "blocks.0"))
    for ids in (torch.arange(6)[None], torch.arange(2, 8)[None], torch.zeros(1, 6, dtype=torch.long)):
        torch.testing.assert_close(program(ids=ids), model(ids=ids))
