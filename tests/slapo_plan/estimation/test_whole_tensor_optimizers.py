"""Estimated memory and messages of optimizers that step whole tensors, beside real ranks that hold parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from slapo_testing import run_distributed

from .layouts import FSDP, Layout, Totals, _measured, estimated, totals


def muon(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2])


LAYOUTS = {
    "tp": Layout(tp=2),
    "fsdp": Layout(dp=2, options=FSDP),
    "tp-fsdp": Layout(dp=2, tp=2, options=FSDP),
    "tp-ddp": Layout(dp=2, tp=2),
}
OPTIMIZERS = {"muon": muon, "adafactor": torch.optim.Adafactor}


def with_optimizer(layout: str, optimizer: str) -> Layout:
    found = LAYOUTS[layout]
    return found._replace(options={**found.options, "optimizer": OPTIMIZERS[optimizer]})


def measure(rank: int, model: str, cases: Sequence[tuple[str, str]]) -> list[tuple[int, int, Totals]]:
    return [_measured(model, with_optimizer(*case)) for case in cases]


def check(model: str, layouts: Sequence[str], ranks: int) -> None:
    cases = [(layout, optimizer) for layout in layouts for optimizer in OPTIMIZERS]
    truth = run_distributed(measure, ranks, model, cases, timeout=250)
    for index, case in enumerate(cases):
        found = estimated(model, with_optimizer(*case))
        held, peak = (max(rank[index][place] for rank in truth) for place in range(2))
        assert found.ranks[0].memory.held == pytest.approx(held, rel=0.01), case
        assert found.ranks[0].memory.peak == pytest.approx(peak, rel=0.01), case
        assert totals(found, 0) == truth[0][index][2], case
        assert not found.notes


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_memory_and_collectives_are_those_of_real_ranks(model: str) -> None:
    check(model, ["tp", "fsdp"], 2)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(400)
def test_shards_of_replicas_on_four_ranks() -> None:
    check("llama", ["tp-fsdp", "tp-ddp"], 4)


def test_whole_tensors_are_gathered_for_the_step() -> None:
    plain, whole = (
        estimated("perceptron", Layout(dp=2, options={**FSDP, "optimizer": each})) for each in (torch.optim.SGD, muon)
    )
    assert not {each.kind for each in plain.collectives} & {"all_to_all"}
    assert {each.kind for each in whole.collectives} >= {"all_to_all"}
    assert whole.peak > plain.peak
