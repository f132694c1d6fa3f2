"""Estimated memory of optimizers that step whole tensors, on real ranks that hold parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from slapo_testing import run_distributed

from .layouts import FSDP, Layout, _measured, estimated


def muon(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2])


LAYOUTS = {"tp": Layout(tp=2), "fsdp": Layout(dp=2, options=FSDP)}
OPTIMIZERS = {"muon": muon, "adafactor": torch.optim.Adafactor}


def with_optimizer(layout: str, optimizer: str) -> Layout:
    found = LAYOUTS[layout]
    return found._replace(options={**found.options, "optimizer": OPTIMIZERS[optimizer]})


def measure(rank: int, cases: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    return [_measured("llama", with_optimizer(*case))[:2] for case in cases]


@pytest.mark.slow
@pytest.mark.multiproc
def test_memory_is_that_of_real_ranks() -> None:
    cases = [(layout, optimizer) for layout in LAYOUTS for optimizer in OPTIMIZERS]
    truth = run_distributed(measure, 2, cases, timeout=250)
    for index, case in enumerate(cases):
        found = estimated("llama", with_optimizer(*case))
        held, peak = (max(rank[index][place] for rank in truth) for place in range(2))
        assert found.ranks[0].memory.held == pytest.approx(held, rel=0.01), case
        assert found.ranks[0].memory.peak == pytest.approx(peak, rel=0.01), case
        assert "steps whole tensors" in found.notes[0]


def test_whole_tensors_are_gathered_for_the_step() -> None:
    plain, whole = (
        estimated("perceptron", Layout(dp=2, options={**FSDP, "optimizer": each})) for each in (torch.optim.SGD, muon)
    )
    assert not plain.notes
    assert whole.notes == ["the optimizer steps whole tensors, whose messages between ranks are not counted"]
    assert whole.peak > plain.peak
