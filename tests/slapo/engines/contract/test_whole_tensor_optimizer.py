"""Optimizers that step a tensor as a whole are right where engines flatten parameters or ranks hold shards of them."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from tests.engines import zero
from tests.slapo_torch.layouts import mesh_of, message_of
from tests.strange_optimizers import BY_SHAPE, COUPLED, WHOLE
from tests.whole_steps import PLUGINS, engine_of, errors, in_place, resumed, saved, stepped_in_place

pytestmark = pytest.mark.multiproc

Where = tuple[dict[str, int], dict[str, Any]]
"""A layout, and options."""
ALL = [*{**WHOLE, **BY_SHAPE, **COUPLED}]
STEPPED = [name for name in ALL if name != "coupled groups"]
"""The one left out is refused by DeepSpeed, see below."""
SOME = ["muon", "lamb", "by place", "groupwise", "composite", "scaled", "prodigy", "adamw", "wrapper", "counting"]
FACTORED = ["muon", "lamb", "adafactor"]
KEPT = ["muon", "composite", "adafactor"]
STATISTICS = ["lamb", "lars", "factored", "hugging face"]
SLOW: list[tuple[str, str, dict[str, int], list[str], dict[str, Any]]] = [
    ("deepspeed", "gqa", {"dp": 2}, ["muon", "scaled", "wrapper", "counting"], zero(3)),
    ("deepspeed", "gqa", {"dp": 2}, STEPPED, zero(1)),
    ("deepspeed", "gqa", {"dp": 2}, SOME, zero(2)),
    ("deepspeed", "gqa", {"tp": 2}, SOME, zero(0)),
    ("deepspeed", "gqa", {"tp": 2}, SOME, zero(1)),
    ("deepspeed", "one", {"dp": 2, "tp": 2}, FACTORED, zero(1)),
    ("deepspeed", "gpt2", {"pp": 2}, ["muon", "lamb"], zero(1)),
    ("megatron", "gqa", {"tp": 2}, ALL, {}),
    ("megatron", "one", {"dp": 2, "tp": 2}, FACTORED, {}),
]


def _check(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts
        assert all(isinstance(error, float) and error < 1e-3 for error in facts.values()), facts


@pytest.mark.parametrize(
    ("target", "kind", "layout", "names", "options"),
    [
        ("deepspeed", "gqa", {"dp": 2}, ["muon", "by place", "scaled", "wrapper", "counting"], zero(1)),
        ("megatron", "gqa", {"tp": 2}, ["lamb", "composite", "prodigy"], {}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=str,
)
def test_a_layout_steps_as_one_process_does(
    target: str, kind: str, layout: dict[str, int], names: list[str], options: dict[str, Any]
) -> None:
    _check(run_distributed(errors, prod(layout.values()), target, kind, layout, names, options, timeout=200))


@pytest.mark.slow
def test_an_optimizer_of_deepspeeds_config_is_one_of_the_kind() -> None:
    named = {"optimizer": {"type": "Adafactor", "params": {"lr": 0.05}}}
    for stage, layout in ((1, {"dp": 2}), (0, {"tp": 2})):
        options = {"config": {**zero(stage)["config"], **named}}
        _check(run_distributed(errors, 2, "deepspeed", "gqa", layout, ["adafactor"], options))


def _messages(rank: int, folder: str) -> list[str]:
    mesh = mesh_of(dp=2)
    found = [message_of(lambda: engine_of("deepspeed", "gqa", "coupled groups", mesh, **zero(1)))]
    for stage, work in ((0, "save"), (1, "load")):
        engine: Any = engine_of("deepspeed", "gqa", "lamb", mesh, **zero(stage))[0]
        found.append(message_of(partial(getattr(engine, work), folder)))
        engine.close()
    return [*found, message_of(lambda: engine_of("megatron", "gqa", "muon", mesh_of(tp=2), distributed_optimizer=True))]


def test_what_cannot_be_right_is_refused(tmp_path: Any) -> None:
    for groups, save, load, shared_out in run_distributed(_messages, 2, str(tmp_path)):
        assert "makes the step of one parameter depend on the others, and ZeRO steps 2 groups of them" in groups
        assert save == "no error"
        assert "Lamb steps whole tensors here, and the checkpoint was saved where ranks had all of them" in load
        assert "leave distributed_optimizer out" in shared_out


@pytest.mark.parametrize(
    ("target", "names", "before", "after"),
    [
        ("deepspeed", ["composite", "adafactor"], ({"dp": 2}, zero(1)), ({"tp": 2}, zero(0))),
        ("megatron", ["muon"], ({"tp": 2}, {}), ({}, {})),
        pytest.param("deepspeed", KEPT, ({"dp": 2}, zero(1)), ({"tp": 2}, zero(0)), marks=pytest.mark.slow),
        pytest.param("deepspeed", KEPT, ({"dp": 2}, zero(1)), ({"dp": 2}, zero(1)), marks=pytest.mark.slow),
        pytest.param("deepspeed", KEPT, ({"tp": 2}, zero(0)), ({"dp": 2}, zero(3)), marks=pytest.mark.slow),
        pytest.param("deepspeed", KEPT, ({"dp": 2}, zero(1)), ({}, zero(0)), marks=pytest.mark.slow),
        pytest.param("megatron", KEPT, ({"tp": 2}, {}), ({}, {}), marks=pytest.mark.slow),
        pytest.param("megatron", KEPT, ({"tp": 2}, {}), ({"tp": 2}, {}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states_go_to_other_layouts(target: str, names: list[str], before: Where, after: Where, tmp_path: Any) -> None:
    found = []
    for work, (layout, options) in ((saved, before), (resumed, after)):
        found = run_distributed(work, prod(layout.values()), target, "gqa", layout, names, options, str(tmp_path))
    _check(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("deepspeed", zero(0), STATISTICS[:-1]),
        ("deepspeed", zero(1), []),
        ("megatron", {}, STATISTICS[:-1]),
    ],
    ids=str,
)
def test_shards_are_stepped_in_place_where_they_are_not_flattened(
    target: str, options: dict[str, Any], expected: list[str]
) -> None:
    for found in run_distributed(in_place, 2, stepped_in_place, target, {"tp": 2}, STATISTICS, options):
        assert found == expected
    if expected:
        _check(run_distributed(in_place, 2, errors, target, "gqa", {"tp": 2}, STATISTICS, options))


@pytest.mark.slow
def test_fp32_copies_are_stepped_in_place_as_owners_step_them() -> None:
    given: Any = ("megatron", "gqa", {"tp": 2}, STATISTICS[:-1], {"precision": "bf16"})
    for found, expected in zip(run_distributed(in_place, 2, errors, *given), run_distributed(errors, 2, *given), strict=True):
        assert found == pytest.approx(expected, rel=0.1)


TP: dict[str, int] = {"tp": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "before", "after"),
    [
        ("deepspeed", (TP, zero(0), True), ({"dp": 2}, zero(1), False)),
        ("deepspeed", ({"dp": 2}, zero(1), False), (TP, zero(0), True)),
        ("megatron", (TP, {}, True), ({}, {}, False)),
        ("megatron", (TP, {}, False), (TP, {}, True)),
    ],
    ids=str,
)
def test_states_of_shards_go_to_other_layouts(target: str, before: Any, after: Any, tmp_path: Any) -> None:
    """Each with whether shards are stepped in place there."""
    found = []
    for work, (layout, options, is_in_place) in ((saved, before), (resumed, after)):
        called: Any = (in_place, 2, work) if is_in_place else (work, prod(layout.values()))
        found = run_distributed(*called, target, "gqa", layout, STATISTICS[:-1], options, str(tmp_path))
    _check(found)


def losses_after_a_load(rank: int, target: str, layout: dict[str, int], options: dict[str, Any], folder: str) -> Any:
    """Losses of the steps after a save, and of the same steps after its load, with an optimizer that steps whole tensors."""
    torch.manual_seed(0)
    mesh, x = mesh_of(**layout), torch.randn(8, 8)
    schedule = create_schedule(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), mesh=mesh, example_inputs=(x[:4],), plugins=PLUGINS
    )
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    given: Any = {"optimizer": partial(torch.optim.Adafactor, lr=0.1), "loss_fn": nn.functional.mse_loss, **options}
    engine: Any = build(schedule, target, lr_scheduler=lambda each: LambdaLR(each, lambda step: 1 / (1 + step)), **given)
    own = x.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]

    def losses() -> list[float]:
        return [engine.train_batch(input=own, labels=own).item() for _ in range(2)]

    losses()
    engine.save(folder)
    expected = losses()
    engine.load(folder)
    found = losses()
    engine.close()
    return expected, found


@pytest.mark.parametrize(
    ("target", "layout", "options"),
    [
        ("torch", {"tp": 2}, {}),
        ("megatron", {"tp": 2}, {}),
        pytest.param("torch", {"dp": 2}, {"data_parallel": "fsdp"}, marks=pytest.mark.slow),
        pytest.param("deepspeed", {"tp": 2}, zero(0), marks=pytest.mark.slow),
        pytest.param("deepspeed", {"dp": 2}, zero(1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_whole_tensors_go_on_at_their_learning_rate(
    target: str, layout: dict[str, int], options: dict[str, Any], tmp_path: Any
) -> None:
    for expected, found in run_distributed(losses_after_a_load, 2, target, layout, options, str(tmp_path)):
        assert found == expected
