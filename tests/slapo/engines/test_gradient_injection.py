"""Gradients that a model injects into its backward: every engine weighs them as the whole batch does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo
from slapo_testing import run_distributed
from tests.slapo.gradient_injection import WAYS, Net, batches
from tests.slapo_torch.layouts import mesh_of

SGD = partial(torch.optim.SGD, lr=0.1)


def plainly(model: nn.Module, steps: list[dict[str, torch.Tensor]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the unmodified model, on whole batches."""
    model = copy.deepcopy(model)
    optimizer, losses = SGD(model.parameters()), []
    for each in steps:
        optimizer.zero_grad()
        loss = model(**each)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def error(model: nn.Module, target: str, layout: dict[str, int], ignores: bool = False, cuts: int = 0, **options: Any) -> float:
    """How far an engine's losses and weights are from those, of three steps; weights by what the steps added."""
    mesh, before = mesh_of(**layout), {name: value.detach().clone() for name, value in model.named_parameters()}
    steps = batches(ignores=ignores)
    losses, weights = plainly(model, steps)
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs={name: value[:2] for name, value in steps[0].items()})
    for index in range(cuts):
        sch[f"blocks.{(index + 1) * 4 // (cuts + 1) - 1}"].cut_pipeline_stage()
    dp, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    engine = slapo.build(sch, target, optimizer=SGD, **{"microbatches": 4, **options})
    worst = 0.0
    try:
        for expected, each in zip(losses, steps, strict=True):
            loss = float(engine.train_batch(**{name: value.chunk(dp)[rank] for name, value in each.items()}))
            worst = max(worst, abs(loss - expected))
        whole = getattr(engine, "whole_parameters", None)
        found = sch.full_state() if whole is None else _within(whole, sch)
    finally:
        engine.close()
    for name, value in weights.items():
        added = (value - before[name]).abs().max().item()
        worst = max(worst, (found[name] - value).abs().max().item() / added)
    return worst


def _within(whole: Any, sch: Any) -> dict[str, Any]:
    with whole():
        return {name: value.clone() for name, value in sch.full_state().items() if value is not None}


def cases() -> Iterator[tuple[str, Any]]:
    """Names of what is compared on two ranks, and the arguments of ``error``."""
    for way in WAYS:
        yield f"{way}, two replicas", (partial(Net, way), "torch", {"dp": 2})
    net, some = partial(Net, "attached"), partial(Net, "attached", (3,))
    for ignores in (False, True):
        labels = "ignored labels" if ignores else "all labels"
        yield f"torch, dp, {labels}", (net, "torch", {"dp": 2}, ignores)
        yield f"torch, fsdp, {labels}", (net, "torch", {"dp": 2}, ignores, 0, {"data_parallel": "fsdp"})
        yield f"torch, pp, {labels}", (some, "torch", {"pp": 2}, ignores, 1)
        for schedule in ("interleaved", "zero_bubble"):
            yield f"{schedule}, {labels}", (some, "torch", {"pp": 2}, ignores, 3, {"pipeline_schedule": schedule})
        yield f"recomputed, pp, {labels}", (partial(Net, "attached", recompute=True), "torch", {"pp": 2}, ignores, 1)
        yield f"recomputed, dp, {labels}", (partial(Net, "attached", recompute=True), "torch", {"dp": 2}, ignores)
        for stage in range(4):
            config = {"zero_optimization": {"stage": stage}}
            yield f"ZeRO-{stage}, {labels}", (net, "deepspeed", {"dp": 2}, ignores, 0, {"config": config})
        yield f"deepspeed, pp, {labels}", (some, "deepspeed", {"pp": 2}, ignores, 1)
        yield f"megatron, dp, {labels}", (net, "megatron", {"dp": 2}, ignores)
        yield f"megatron, pp, {labels}", (some, "megatron", {"pp": 2}, ignores, 1)
        yield f"megatron, interleaved, {labels}", (some, "megatron", {"pp": 2}, ignores, 3)
    yield "one micro-batch, ignored labels", (net, "torch", {"dp": 2}, True, 0, {"microbatches": 1})
    for way in WAYS:
        yield f"{way}, zero_bubble", (partial(Net, way), "torch", {"pp": 2}, True, 3, {"pipeline_schedule": "zero_bubble"})
    yield "clip", (net, "deepspeed", {"dp": 2}, False, 0, {"clip": 100.0})


def _errors(rank: int, chosen: list[str]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, (make, target, layout, *rest) in cases():
        if chosen and name not in chosen:
            continue
        torch.manual_seed(1)
        ignores, cuts, options = (*rest, *(False, 0, {})[len(rest) :])
        try:
            found[name] = error(make(), target, layout, ignores, cuts, **options)
        except Exception as err:
            found[name] = f"{type(err).__name__}: {err}"
        dist.barrier()
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_injected_gradients_weigh_as_in_the_whole_batch(fast: bool) -> None:
    names = [name for name, _ in cases()]
    if fast:
        names = [
            name for name in names if "ignored labels" in name and not name.startswith(("ZeRO-0", "ZeRO-2", "recomputed, dp"))
        ]
    for found in run_distributed(_errors, 2, names, timeout=300):
        assert found
        assert {name: value for name, value in found.items() if not (isinstance(value, float) and value < 2e-4)} == {}
