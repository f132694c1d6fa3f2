"""Measurements of the machine that runs the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slapo_core import SlapoError
from slapo_plan.hardware import Hardware, calibrate
from slapo_plan.hardware.calibration_operators import OperatorTimer
from slapo_plan.hardware.element_wise_calls import element_wise_calls
from slapo_plan.recording import OperatorRecorder


def test_each_element_wise_call_is_one_operator() -> None:
    x, y, state = (torch.rand(512, 512) for _ in range(3))
    names = []
    for call in element_wise_calls(torch.rand):
        with OperatorRecorder() as recorder:
            call(x, y, state)
        (record,) = recorder.records
        assert record.kind == "pointwise"
        names.append(record.name)
    assert len({*names}) == len(names) > 40


def test_a_launch_takes_microseconds() -> None:
    timer = OperatorTimer(torch.device("cpu"), lambda: None, lambda seconds: seconds, ranks=1, cores=2)
    launch, hook = timer.launch_seconds()
    assert 1e-6 < launch < 1e-2
    assert launch < hook < 1e-2  # hooks are Python


def test_a_thread_that_shares_its_core_takes_longer() -> None:
    one, four = (OperatorTimer(torch.device("cpu"), lambda: None, lambda seconds: seconds, ranks, 1) for ranks in (1, 4))
    assert 2 < four.launch_seconds()[0] / one.launch_seconds()[0] < 8


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_are_calibrated(tmp_path: Path) -> None:
    calibrate((1, 2)).save(tmp_path / "here.toml")
    here = Hardware.load(tmp_path / "here.toml")
    both = here.with_busy(2).busy_measurements
    assert both is not None
    assert both.ranks == 2
    assert {key.split()[0] for key in both.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert both.matmul["float32"].at(1e8) > 1e9
    assert 0 < both.unit_seconds < 1e-1


def test_ranks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SlapoError, match=r"ranks is \[\]; give numbers of ranks from 1 on"):
        calibrate(())
