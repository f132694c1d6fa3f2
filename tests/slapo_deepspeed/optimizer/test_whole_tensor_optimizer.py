"""Optimizers that step a tensor as a whole are right on every stage of ZeRO, which flattens parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from slapo_testing import run_distributed
from tests.engines import zero
from tests.slapo_torch.layouts import mesh_of, message_of
from tests.strange_optimizers import BY_SHAPE, COUPLED, WHOLE
from tests.whole_steps import engine_of, errors, in_place, resumed, saved, stepped_in_place

pytestmark = pytest.mark.multiproc

STEPPED = [name for name in {**WHOLE, **BY_SHAPE, **COUPLED} if name != "coupled groups"]
"""The one left out is refused, see below."""
SOME = ["muon", "lamb", "by place", "groupwise", "composite", "scaled", "prodigy", "adamw", "wrapper", "counting"]


@pytest.mark.parametrize(
    ("kind", "layout", "stage", "names"),
    [
        ("gqa", {"dp": 2}, 1, SOME),
        pytest.param("gqa", {"dp": 2}, 3, ["muon", "scaled", "wrapper", "counting"], marks=pytest.mark.slow),
        pytest.param("gqa", {"dp": 2}, 1, STEPPED, marks=pytest.mark.slow),
        pytest.param("gqa", {"dp": 2}, 2, SOME, marks=pytest.mark.slow),
        pytest.param("gqa", {"tp": 2}, 0, SOME, marks=pytest.mark.slow),
        pytest.param("gqa", {"tp": 2}, 1, SOME, marks=pytest.mark.slow),
        pytest.param("one", {"dp": 2, "tp": 2}, 1, ["muon", "lamb", "adafactor"], marks=pytest.mark.slow),
        pytest.param("gpt2", {"pp": 2}, 1, ["muon", "lamb"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layout_steps_as_one_process_does(kind: str, layout: dict[str, int], stage: int, names: list[str]) -> None:
    size = layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)
    for found in run_distributed(errors, size, "deepspeed", kind, layout, names, zero(stage), timeout=200):
        assert found
        assert all(isinstance(error, float) and error < 1e-3 for error in found.values()), found


@pytest.mark.slow
def test_an_optimizer_of_the_config_is_one_of_the_kind() -> None:
    named = {"optimizer": {"type": "Adafactor", "params": {"lr": 0.05}}}
    for stage, layout in ((1, {"dp": 2}), (0, {"tp": 2})):
        options = {"config": {**zero(stage)["config"], **named}}
        for found in run_distributed(errors, 2, "deepspeed", "gqa", layout, ["adafactor"], options):
            assert isinstance(found["adafactor"], float), found
            assert found["adafactor"] < 1e-3


def _messages(rank: int, folder: str) -> list[str]:
    mesh = mesh_of(dp=2)
    found = [message_of(lambda: engine_of("deepspeed", "gqa", "coupled groups", mesh, **zero(1)))]
    for stage, work in ((0, "save"), (1, "load")):
        engine: Any = engine_of("deepspeed", "gqa", "lamb", mesh, **zero(stage))[0]
        found.append(message_of(partial(getattr(engine, work), folder)))
        engine.close()
    return found


def test_what_cannot_be_right_is_refused(tmp_path: Any) -> None:
    for groups, save, load in run_distributed(_messages, 2, str(tmp_path)):
        assert "makes the step of one parameter depend on the others, and ZeRO steps 2 groups of them" in groups
        assert save == "no error"
        assert "Lamb steps whole tensors here, and the checkpoint was saved where ranks had all of them" in load


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({"dp": 2}, 1), ({"tp": 2}, 0)),
        pytest.param(({"dp": 2}, 1), ({"dp": 2}, 1), marks=pytest.mark.slow),
        pytest.param(({"tp": 2}, 0), ({"dp": 2}, 3), marks=pytest.mark.slow),
        pytest.param(({"dp": 2}, 1), ({}, 0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states_go_to_other_layouts(before: Any, after: Any, tmp_path: Any) -> None:
    names, found = ["muon", "composite", "adafactor"], []
    for work, (layout, stage) in ((saved, before), (resumed, after)):
        found = run_distributed(work, sum(layout.values()) or 1, "deepspeed", "gqa", layout, names, zero(stage), str(tmp_path))
    for facts in found:
        assert all(isinstance(error, float) and error < 1e-3 for error in facts.values()), facts


STATISTICS = ["lamb", "lars", "factored", "hugging face"]


@pytest.mark.slow
def test_shards_are_stepped_in_place_without_zero() -> None:
    for stage, expected in ((0, STATISTICS[:-1]), (1, [])):
        for found in run_distributed(in_place, 2, stepped_in_place, "deepspeed", {"tp": 2}, STATISTICS, zero(stage)):
            assert found == expected
    for facts in run_distributed(in_place, 2, errors, "deepspeed", "gqa", {"tp": 2}, STATISTICS, zero(0)):
        assert all(isinstance(error, float) and error < 1e-3 for error in facts.values()), facts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("in place", "zero"), pytest.param("zero", "in place", marks=pytest.mark.slow)], ids=str
)
def test_states_of_shards_go_to_other_layouts(before: str, after: str, tmp_path: Any) -> None:
    found = []
    for work, kind in ((saved, before), (resumed, after)):
        called: Any = (in_place, 2, work) if kind == "in place" else (work, 2)
        layout, stage = ({"tp": 2}, 0) if kind == "in place" else ({"dp": 2}, 1)
        found = run_distributed(*called, "deepspeed", "gqa", layout, STATISTICS[:-1], zero(stage), str(tmp_path))
    for facts in found:
        assert all(isinstance(error, float) and error < 1e-3 for error in facts.values()), facts
