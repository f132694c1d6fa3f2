"""Checkpoints at another layout and with another stage of ZeRO: losses go on as those of one process nothing interrupted."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_core import build
from slapo_testing import run_distributed
from tests.engine_models import batches, halved, my_part, small, two_groups
from tests.engines import scheduled
from tests.slapo_torch.layouts import largest_difference, mesh_of, put_together

from ..parameter_numbers import count_again

pytestmark = pytest.mark.multiproc
Layout = dict[str, int]

LAYOUTS: list[Layout] = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}]
FAST = [(1, 0), (2, 3)]
"""Pairs of the default suite, of one stage of ZeRO each."""


@pytest.fixture(scope="module", autouse=True)
def _counters() -> Iterator[None]:
    """The processes go on to tests of other files."""
    yield
    run_distributed(count_again, 4)


def model_of(is_frozen: bool) -> nn.Module:
    """GPT-2 with tied embeddings, one norm of it frozen or not."""
    model: Any = small("gpt2")
    model.transformer.h[1].ln_1.requires_grad_(not is_frozen)
    return model


def engine_of(layout: Layout, stage: int, precision: str, is_frozen: bool) -> tuple[Any, Any]:
    """The model on a mesh, two groups of parameters and a falling rate, and the mesh."""
    count_again(dist.get_rank())
    mesh = mesh_of(**layout)
    schedule = scheduled(model_of(is_frozen), mesh, my_part(batches(2)[0], mesh))
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40}}
    given: dict[str, Any] = {"optimizer": two_groups, "lr_scheduler": halved, "microbatches": 2, "clip": 0.1}
    return build(schedule, "deepspeed", **given, precision=precision, config=config), mesh


def losses(engine: Any, mesh: Any, steps: range) -> list[float]:
    return [engine.train_batch(**my_part(batches(2)[step], mesh)).item() for step in steps]


def saved(rank: int, layout: Layout, stages: list[int], folder: str, precision: str, is_frozen: bool) -> list[list[float]]:
    """Losses of two steps and a save with each stage, and of those behind it."""
    found = []
    for stage in stages:
        engine, mesh = engine_of(layout, stage, precision, is_frozen)
        before = losses(engine, mesh, range(2))
        engine.save(f"{folder}/{stage}", extra={"next": 2})
        weights = put_together(engine, mesh)
        if rank == 0:
            torch.save(weights, f"{folder}/{stage}.pt")
        found.append(before + losses(engine, mesh, range(2, 5)))
        engine.close()
    return found


def resumed(
    rank: int, layout: Layout, pairs: list[tuple[int, int]], folder: str, precision: str, is_frozen: bool
) -> list[tuple[list[float], float]]:
    """Losses of engines that trained on other batches and then loaded, and how far their weights are then from the right ones.

    Args:
        pairs: The stage that was saved with, and that of the engine.
    """
    found = []
    for before, stage in pairs:
        engine, mesh = engine_of(layout, stage, precision, is_frozen)
        losses(engine, mesh, range(3, 4))
        assert engine.load(f"{folder}/{before}") == {"next": 2}
        assert engine.steps == engine.model.global_steps == 2
        weights, kept = put_together(engine, mesh), torch.load(f"{folder}/{before}.pt")
        assert all(torch.equal(weights[name], kept[name]) for name in weights)  # also those in fp32 beside bf16
        behind = losses(engine, mesh, range(2, 5))
        difference = largest_difference(put_together(engine, mesh), uninterrupted(is_frozen)[1])
        found.append((behind, difference))
        engine.close()
    return found


@functools.cache
def uninterrupted(is_frozen: bool) -> tuple[list[float], nn.Module]:
    """Losses of five steps in one process, and the model after them."""
    model = model_of(is_frozen)
    optimizer = two_groups([parameter for parameter in model.parameters() if parameter.requires_grad])
    rate, found = halved(optimizer), []
    for batch in batches(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        rate.step()
        found.append(loss.item())
    return found, model


def stages_of(layout: Layout, precision: str = "fp32") -> list[int]:
    known = [0, 1] if layout.get("pp", 1) > 1 else [0, 1, 2, 3]
    return known if precision == "fp32" else known[1:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of each layout with each stage, saved when they are first asked for."""
    found: dict[str, str] = {}

    def folder_of(layout: Layout, stages: list[int], precision: str, is_frozen: bool) -> str:
        key = f"{layout} {stages} {precision} {is_frozen}"
        if key not in found:
            found[key] = str(tmp_path_factory.mktemp("checkpoint"))
            tolerance = 2e-5 if precision == "fp32" else 2e-2
            for every in run_distributed(saved, _size(layout), layout, stages, found[key], precision, is_frozen, timeout=110):
                for values in every:
                    assert values == pytest.approx(uninterrupted(is_frozen)[0], abs=tolerance)
        return found[key]

    return folder_of


def _size(layout: Layout) -> int:
    return math.prod(layout.values())


def check(folder: str, other: Layout, pairs: list[tuple[int, int]], precision: str = "fp32", is_frozen: bool = False) -> None:
    near = 2e-5 if precision == "fp32" else 2e-2
    for found in run_distributed(resumed, _size(other), other, pairs, folder, precision, is_frozen, timeout=300):
        for pair, (values, difference) in zip(pairs, found, strict=True):
            assert values == pytest.approx(uninterrupted(is_frozen)[0][2:], abs=near), pair
            assert difference < near, pair


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("one", "other"), FAST)
def test_losses_go_on(one: int, other: int, folders: Any) -> None:
    folder = folders(LAYOUTS[one], [1], "fp32", False)
    check(folder, LAYOUTS[other], [(1, 0 if other == 0 else 2)])


@pytest.mark.slow
@pytest.mark.parametrize("one", range(5), ids=lambda one: f"{LAYOUTS[one]} to")
@pytest.mark.parametrize("other", range(5), ids=lambda other: f"{LAYOUTS[other]}")
def test_losses_go_on_at_any_layout_and_stage(one: int, other: int, folders: Any) -> None:
    stages = stages_of(LAYOUTS[one])
    folder = folders(LAYOUTS[one], stages, "fp32", True)
    check(folder, LAYOUTS[other], [(i, j) for i in stages for j in stages_of(LAYOUTS[other])], is_frozen=True)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 3), (3, 1), (4, 3), (3, 4)])
def test_losses_go_on_in_bf16(one: int, other: int, folders: Any) -> None:
    stages = stages_of(LAYOUTS[one], "bf16")
    folder = folders(LAYOUTS[one], stages, "bf16", False)
    check(folder, LAYOUTS[other], [(i, j) for i in stages for j in stages_of(LAYOUTS[other], "bf16")], "bf16")
