"""Optimizers that step a tensor as a whole are right on Megatron's tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import run_distributed
from tests.slapo_torch.layouts import mesh_of, message_of
from tests.strange_optimizers import BY_SHAPE, COUPLED, WHOLE
from tests.whole_steps import engine_of, errors, in_place, resumed, saved, stepped_in_place

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(
    ("kind", "layout", "names", "options"),
    [
        ("gqa", {"tp": 2}, ["muon", "lamb", "composite", "prodigy"], {}),
        pytest.param("gqa", {"tp": 2}, list({**WHOLE, **BY_SHAPE, **COUPLED}), {}, marks=pytest.mark.slow),
        pytest.param("one", {"dp": 2, "tp": 2}, ["muon", "lamb", "adafactor"], {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layout_steps_as_one_process_does(
    kind: str, layout: dict[str, int], names: list[str], options: dict[str, Any]
) -> None:
    size = layout.get("dp", 1) * layout.get("tp", 1)
    for found in run_distributed(errors, size, "megatron", kind, layout, names, options, timeout=200):
        assert found
        assert all(isinstance(error, float) and error < 1e-3 for error in found.values()), found


def _messages(rank: int, folder: str) -> list[str]:
    mesh = mesh_of(tp=2)
    return [message_of(lambda: engine_of("megatron", "gqa", "muon", mesh, distributed_optimizer=True))]


def test_what_cannot_be_right_is_refused(tmp_path: Any) -> None:
    for (shared_out,) in run_distributed(_messages, 2, str(tmp_path)):
        assert "leave distributed_optimizer out" in shared_out


@pytest.mark.parametrize("layout", [{}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_states_go_to_other_layouts(layout: dict[str, int], tmp_path: Any) -> None:
    names = ["muon", "composite", "adafactor"]
    run_distributed(saved, 2, "megatron", "gqa", {"tp": 2}, names, {}, str(tmp_path))
    for facts in run_distributed(resumed, sum(layout.values()) or 1, "megatron", "gqa", layout, names, {}, str(tmp_path)):
        assert all(isinstance(error, float) and error < 1e-3 for error in facts.values()), facts


STATISTICS = ["lamb", "lars", "factored", "hugging face"]


@pytest.mark.slow
def test_shards_are_stepped_in_place() -> None:
    for found in run_distributed(in_place, 2, stepped_in_place, "megatron", {"tp": 2}, STATISTICS, {}):
        assert found == STATISTICS[:-1]
    for facts in run_distributed(in_place, 2, errors, "megatron", "gqa", {"tp": 2}, STATISTICS, {}):
        assert all(isinstance(error, float) and error < 1e-3 for error in facts.values()), facts


@pytest.mark.slow
def test_fp32_copies_are_stepped_in_place_as_owners_step_them() -> None:
    given: Any = ("megatron", "gqa", {"tp": 2}, STATISTICS[:-1], {"precision": "bf16"})
    for found, expected in zip(run_distributed(in_place, 2, errors, *given), run_distributed(errors, 2, *given), strict=True):
        assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("in place", "one"), pytest.param("owners", "in place", marks=pytest.mark.slow)], ids=str
)
def test_states_of_shards_go_to_other_layouts(before: str, after: str, tmp_path: Any) -> None:
    found = []
    for work, kind in ((saved, before), (resumed, after)):
        layout: dict[str, int] = {} if kind == "one" else {"tp": 2}
        called: Any = (in_place, 2, work) if kind == "in place" else (work, layout.get("tp", 1))
        found = run_distributed(*called, "megatron", "gqa", layout, STATISTICS[:-1], {}, str(tmp_path))
    for facts in found:
        assert all(isinstance(error, float) and error < 1e-3 for error in facts.values()), facts
