"""Page and trace of an estimate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slapo_core import SlapoError, create_schedule
from slapo_plan import estimate

from ...browser import CHROMIUM, faults_of
from ...html_page import Page
from .test_step_time import estimated


def test_the_page_and_the_trace_are_written(tmp_path: Path) -> None:
    found = estimated(pp=2, dp=2)
    found.report(tmp_path / "plan.html")
    text = Page((tmp_path / "plan.html").read_text(encoding="utf-8")).text
    for words in ("pp rank 1", "Simulated step", "optimizer step", "Bytes per step", "Sent over each link", "plan.trace.json"):
        assert words in text
    events = json.loads((tmp_path / "plan.trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"F 0", "B 3", "SEND_F 0", "RECV_B 3", "optimizer step"} <= names
    assert {event["pid"] for event in events} == {0, 1}


def test_traffic_is_in_the_data_and_the_text() -> None:
    found = estimated(pp=2, dp=2)
    data = found.to_dict()
    assert data["traffic"]["labels"] == [f"rank {rank}" for rank in range(4)]
    assert sum(map(sum, data["traffic"]["bytes"])) == sum(each["all_bytes"] for each in data["links"]) > 0
    assert {each["link"] for each in data["collectives"]} == {"within a node"}
    assert "pp rank 0 sends " in str(found)


def test_without_hardware_there_is_no_trace(tmp_path: Path) -> None:
    sch = create_schedule(torch.nn.Linear(4, 4))
    found = estimate(sch, {"input": torch.ones(2, 4)}, loss_fn=lambda outputs, labels: outputs.sum())
    found.report(tmp_path / "plan.html")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    with pytest.raises(SlapoError, match="save_trace: the estimate has no times; estimate with hardware="):
        found.save_trace(tmp_path / "trace.json")


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SlapoError, match="report: '.*plan.html' cannot be written, No such file or directory; give a file"):
        estimated().report(tmp_path / "none" / "plan.html")
    with pytest.raises(SlapoError, match="save_trace: '.*' cannot be written, Is a directory"):
        estimated().save_trace(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_can_be_read_in_a_browser(tmp_path: Path) -> None:
    estimated(pp=2, dp=2).report(tmp_path / "plan.html")
    assert faults_of((tmp_path / "plan.html").read_text(encoding="utf-8"), tmp_path) == []
