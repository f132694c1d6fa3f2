"""Optimizers that need statistics of whole parameters alone step large shards in place, and gather nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slapo_testing import run_distributed
from slapo_training.distributed._torch_private import CollectiveCalledError, MessageWatch
from tests.slapo_torch.layouts import mesh_of
from tests.whole_steps import batches, engine_of, errors, in_place, part_of, resumed, saved, stepped_in_place

pytestmark = pytest.mark.multiproc

FSDP = {"data_parallel": "fsdp"}
STATISTICS = ["lamb", "lars", "factored"]
"""Optimizers that need norms, or means of rows and columns."""
OTHERS = ["hugging face", "adafactor", "muon"]
"""Optimizers whose code does not run on DTensors, or gathers there."""


def size_of(layout: dict[str, int]) -> int:
    return layout.get("dp", 1) * layout.get("tp", 1)


def worst(found: list[dict[str, float | str]]) -> None:
    for facts in found:
        assert facts
        assert all(isinstance(error, float) and error < 1e-3 for error in facts.values()), facts


@pytest.mark.parametrize(
    ("layout", "names", "options"),
    [
        ({"tp": 2}, ["lars", "factored", "hugging face"], {}),
        pytest.param({"tp": 2}, [*STATISTICS, "centralised", "lookahead", "hugging face"], {}, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, [*STATISTICS, "hugging face"], FSDP, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, STATISTICS, {}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, ["lamb", "factored"], FSDP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layout_steps_as_one_process_does(layout: dict[str, int], names: list[str], options: dict[str, Any]) -> None:
    worst(run_distributed(in_place, size_of(layout), errors, "torch", "gqa", layout, names, options, timeout=200))


@pytest.mark.slow
def test_others_keep_owners() -> None:
    names = [*STATISTICS, *OTHERS, "prodigy"]
    for found in run_distributed(in_place, 2, stepped_in_place, "torch", {"tp": 2}, names, {}):
        assert found == STATISTICS


def test_small_parameters_keep_owners() -> None:
    assert run_distributed(stepped_in_place, 2, "torch", {"tp": 2}, STATISTICS, {}) == [[], []]


def _is_gathered(rank: int, name: str) -> bool:
    """Return whether a step sends more than statistics: at most one for each row."""
    engine, _ = engine_of("torch", "gqa", name, mesh_of(tp=2))
    engine.train_batch(**part_of(batches(1)[0], mesh_of(tp=2)))
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        with MessageWatch(64):  # type: ignore[no-untyped-call]
            engine.optimizer.step()
    except CollectiveCalledError:
        return True
    return False


@pytest.mark.slow
def test_nothing_is_gathered() -> None:
    for name in ("lamb", "factored"):
        assert run_distributed(in_place, 2, _is_gathered, name) == [False, False], name
    assert run_distributed(_is_gathered, 2, "lamb") == [True, True]


OWNERS, IN_PLACE = False, True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({"tp": 2}, IN_PLACE), ({}, OWNERS)),
        (({"tp": 2}, OWNERS), ({"tp": 2}, IN_PLACE)),
        pytest.param(({"tp": 2}, IN_PLACE), ({"tp": 2}, OWNERS), marks=pytest.mark.slow),
        pytest.param(({"tp": 2}, IN_PLACE), ({"tp": 2}, IN_PLACE), marks=pytest.mark.slow),
        pytest.param(({"dp": 2, **FSDP}, IN_PLACE), ({"tp": 2}, IN_PLACE), marks=pytest.mark.slow),
        pytest.param(({}, OWNERS), ({"dp": 2, **FSDP}, IN_PLACE), marks=pytest.mark.slow),
        pytest.param(({"dp": 2, "tp": 2}, IN_PLACE), ({"dp": 2, **FSDP}, OWNERS), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states_go_to_other_layouts(before: Any, after: Any, tmp_path: Path) -> None:
    found = []
    for work, (given, is_in_place) in ((saved, before), (resumed, after)):
        layout = {axis: size for axis, size in given.items() if axis != "data_parallel"}
        options = {key: value for key, value in given.items() if key == "data_parallel"}
        called = (in_place, size_of(layout), work) if is_in_place else (work, size_of(layout))
        found = run_distributed(*called, "torch", "gqa", layout, STATISTICS, options, str(tmp_path), timeout=200)
    worst(found)
