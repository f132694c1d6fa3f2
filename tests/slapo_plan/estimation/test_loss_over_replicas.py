"""Estimated collectives and memory of a loss of all replicas, beside real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from slapo_testing import run_distributed

from .layouts import FSDP, Layout, Totals, _measured, estimated, totals


def loss_of_rows(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


LOSS = {"loss_fn": loss_of_rows, "loss_over": "replicas"}
LAYOUTS = {
    "ddp": Layout(dp=2, options=LOSS),
    "ddp-parts": Layout(dp=2, microbatches=2, options=LOSS),
    "fsdp": Layout(dp=2, options={**LOSS, **FSDP}),
    "fsdp-parts": Layout(dp=2, microbatches=2, options={**LOSS, **FSDP}),
    "tp-parts": Layout(tp=2, microbatches=2, options=LOSS),
    "1f1b": Layout(pp=2, microbatches=4, options=LOSS),
    "pp-ddp": Layout(pp=2, dp=2, microbatches=2, options=LOSS),
}


def measure(rank: int, layouts: Sequence[str]) -> list[tuple[int, int, Totals]]:
    return [_measured("gpt2", LAYOUTS[each]) for each in layouts]


def check(layouts: Sequence[str], ranks: int) -> None:
    truth = run_distributed(measure, ranks, layouts, timeout=280)
    for index, name in enumerate(layouts):
        layout, found = LAYOUTS[name], estimated("gpt2", LAYOUTS[name])
        assert not found.problems
        assert bool(found.notes) == (layout.microbatches > 1)
        for rank in range(layout.pp):
            held, peak, collectives = truth[rank * layout.dp * layout.tp][index]
            assert totals(found, rank) == collectives, (name, rank)
            if layout.pp == 1:  # the last stage holds all outputs until the next step, as the note says
                assert found.ranks[rank].memory.held == pytest.approx(held, rel=0.01), (name, rank)
            if layout.microbatches == 1:
                assert found.ranks[rank].memory.peak == pytest.approx(peak, rel=0.01), (name, rank)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(400)
def test_two_ranks() -> None:
    check([name for name, layout in LAYOUTS.items() if layout.ranks == 2], 2)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(400)
def test_four_ranks() -> None:
    check(["pp-ddp"], 4)


def test_outputs_and_labels_of_all_replicas_are_gathered() -> None:
    found = estimated("gpt2", LAYOUTS["ddp"])
    gathered = {each.nbytes: each.count for each in found.collectives if each.kind == "all_gather"}
    rows, length, vocabulary = 2 * 2, 32, 256
    assert gathered == {4 * rows * length * vocabulary: 1, 8 * rows * length: 1}
