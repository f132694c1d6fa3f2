"""Estimated memory of sparse gradients beside real steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from slapo_core import build, create_schedule
from slapo_plan import estimate, measure_step
from slapo_testing import run_distributed

SGD = partial(torch.optim.SGD, lr=0.1)


class Words(nn.Module):
    """Classifier of words with a sparse embedding."""

    def __init__(self, size: int = 400) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, 32, sparse=True)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), labels.flatten())


def batch(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * 16).view(rows, 16)
    return {"ids": ids, "labels": ids % 10}


def measured_bytes(rank: int, microbatches: int) -> tuple[int, int]:
    """Return the bytes between steps and at the peak; in a process of its own, since all of its tensors count."""
    given, options = batch(4 * microbatches), {"optimizer": SGD, "microbatches": microbatches}
    sch = create_schedule(Words(), example_inputs=batch(4))  # holds the example inputs
    engine = build(sch, target="torch", check=False, **options)
    for _ in range(2):
        engine.train_batch(**given)
    step = measure_step(lambda: engine.train_batch(**given))
    return step.held, step.peak


@pytest.mark.parametrize("microbatches", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 4))])
def test_rows_of_all_micro_batches_are_counted(microbatches: int) -> None:
    given, options = batch(4 * microbatches), {"optimizer": SGD, "microbatches": microbatches}
    sch = create_schedule(Words(), example_inputs=batch(4))
    memory = estimate(sch, given, **options).ranks[0].memory
    ((held, peak),) = run_distributed(measured_bytes, 1, microbatches)
    assert memory.held == pytest.approx(held, rel=0.01)
    assert memory.peak == pytest.approx(peak, rel=0.01)


def test_what_is_not_counted_for_large_embeddings_is_a_note() -> None:
    with torch.device("meta"):
        model = Words(size=2**22)
    found = estimate(create_schedule(model, example_inputs=batch(4)), batch(4), optimizer=SGD)
    assert "sparse gradients" in found.notes[0]
    assert "are not counted" in found.notes[0]
