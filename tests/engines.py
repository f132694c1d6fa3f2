"""Rank functions of the engine tests: the engine of a target beside the unmodified model in one process."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import slapo_deepspeed.plugin
import slapo_megatron.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule
from slapo_training.checkpoint.manifest import MANIFEST, content_of, text_of
from tests.engine_models import (
    Gated,
    Halves,
    Rated,
    Skips,
    Turned,
    Unused,
    batches,
    halved,
    my_part,
    plain,
    small,
    twice,
    two_groups,
)
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

PLUGINS = Registry(
    [
        slapo_tracing.plugin,
        slapo_training.plugin,
        slapo_pipeline.plugin,
        slapo_sharding.plugin,
        slapo_deepspeed.plugin,
        slapo_megatron.plugin,
    ]
)
FACTS = {"loss", "norm", "evaluation", "weight"}
"""Facts that ``train_beside_reference`` compares."""
NO_OPTIMIZER = "BuildError: this engine was built without an optimizer and only evaluates; pass optimizer= to build"

Losses = tuple[list[float], list[float]]
"""Those of an engine, and those of one process."""


def zero(stage: int) -> dict[str, Any]:
    """Options of a stage of ZeRO."""
    return {"config": {"zero_optimization": {"stage": stage}}}


def scheduled(
    model: nn.Module, mesh: DeviceMesh, example: dict[str, Any], chunks: int = 1, ends: Sequence[str] = ()
) -> Schedule:
    """A model sharded and cut as the mesh wants, into so many stages for each rank, or where stages of one before it ended."""
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=PLUGINS)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    if mesh["pp"].size() > 1:
        schedule.pipeline(boundaries=ends) if ends else schedule.pipeline(mesh["pp"].size() * chunks)
    return schedule


def cut(model: nn.Module, mesh: DeviceMesh, example: dict[str, Any], *paths: str) -> Schedule:
    """A model whose stages end behind these modules."""
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=PLUGINS)
    for path in paths:
        schedule[path].cut_pipeline_stage()
    return schedule


def reseal(folder: Path) -> None:
    """Have a checkpoint take its files for what was written, whatever happened to them."""
    file = folder / MANIFEST
    content = content_of(file.read_text())
    for name in content["files"]:
        found = (folder / content["data"] / name).read_bytes()
        content["files"][name] = [len(found), hashlib.sha256(found).hexdigest()]
    file.write_text(text_of(content))


def trained(engine: Any, data: Iterable[dict[str, Any]]) -> list[float]:
    """Losses of the engine, which is closed then."""
    losses = [engine.train_batch(**batch).item() for batch in data]
    engine.close()
    return losses


def alone(optimizer: torch.optim.Optimizer, losses: Iterable[Callable[[], torch.Tensor]], rate: Any = None) -> list[float]:
    """Losses of one process, each made by one of the functions."""
    found = []
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        if rate is not None:
            rate.step()
        found.append(loss.item())
    return found


def own_losses(model: nn.Module, data: list[dict[str, torch.Tensor]]) -> list[Callable[[], torch.Tensor]]:
    """The model's loss of each batch."""
    return [lambda batch=batch: model(**batch).loss for batch in data]


def errors(model: nn.Module, xs: Iterable[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """How far each of the model's outputs is from its input."""
    return [lambda x=x: F.mse_loss(model(x), x) for x in xs]


def in_one_process(model: nn.Module, data: list[dict[str, torch.Tensor]], clip: float) -> Iterator[tuple[float, float]]:
    """Loss and norm of each step."""
    optimizer = adamw(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        yield loss.item(), norm.item()


@functools.cache
def _reference(name: str, dp: int, clip: float) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]:
    """Losses and norms of five steps in one process; after them the weights, and the loss of an evaluation."""
    model, data = small(name), batches(dp)
    steps = [*in_one_process(model, data, clip)]
    weights = {key: value.detach() for key, value in model.named_parameters(remove_duplicate=False)}
    return steps, weights, model.eval()(**data[0]).loss.item()


def train_beside_reference(
    rank: int,
    target: str,
    name: str,
    layout: dict[str, int],
    variants: dict[str, dict[str, Any]],
    precision: str = "fp32",
    chunks: int = 1,
    clip: float = 0.1,
) -> tuple[dict[str, float], float]:
    """Largest differences over five steps, of the weights after them, and of an evaluation, with each of the options.

    Returns:
        The differences by what is compared and the name of the options, and the largest loss.
    """
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))
    expected, weights, last = _reference(name, layout.get("dp", 1), clip)
    worst: dict[str, float] = {}
    ends: Sequence[str] = ()

    def note(what: str, difference: float) -> None:
        worst[what] = max(worst.get(what, 0.0), difference)

    for variant, options in variants.items():
        schedule = scheduled(small(name), mesh, my_part(data[0], mesh), chunks, ends)
        ends = schedule.metadata.primitives["pipeline"].cuts if mesh["pp"].size() > 1 else ()
        engine: Any = build(schedule, target, optimizer=adamw, microbatches=2, clip=clip, precision=precision, **options)
        for batch, (loss, norm) in zip(data, expected, strict=True):
            note(f"loss {variant}", abs(engine.train_batch(**my_part(batch, mesh)).item() - loss))
            if clip or engine.grad_norm is not None:
                note(f"norm {variant}", abs(engine.grad_norm - norm))
        evaluated = engine.eval_batch(**my_part(data[0], mesh))
        assert evaluated.shape == ()
        note(f"evaluation {variant}", abs(evaluated.item() - last))
        with engine.whole_parameters() if target == "deepspeed" else nullcontext():
            for key, value in schedule.full_state().items():
                assert value is not None
                note(f"weight {variant}", float((value.float() - weights[key]).abs().max()))
        engine.close()
    return worst, max(loss for loss, _ in expected)


# ---- cases: losses of an engine, and those of one process


def uneven(rank: int, target: str, layout: dict[str, int], options: dict[str, Any]) -> Losses:
    """Unequal numbers of labels in micro-batches and replicas; those of the first column are none of the loss."""
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))
    for batch in data:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, 0] = -100
        batch["labels"][-1, 0] = 7
        batch["labels"][0, 3:] = -100
        batch["labels"][-1, 5] = -100
    schedule = scheduled(small("gpt2"), mesh, my_part(data[0], mesh))
    engine = build(schedule, target, optimizer=adamw, microbatches=2, **options)
    reference = small("gpt2")
    return trained(engine, [my_part(batch, mesh) for batch in data]), alone(
        adamw(reference.parameters()), own_losses(reference, data)
    )


def groups_and_rates(rank: int, target: str, layout: dict[str, int], as_objects: bool, options: dict[str, Any]) -> Losses:
    """Two groups of parameters, one block frozen and a falling learning rate."""
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))

    def frozen() -> nn.Module:
        model: Any = small("gpt2")
        model.transformer.h[1].requires_grad_(False)
        return model

    model, reference = frozen(), frozen()
    optimizer: Any = two_groups([p for p in model.parameters() if p.requires_grad]) if as_objects else two_groups
    rate = halved(optimizer) if as_objects else halved
    schedule = scheduled(model, mesh, my_part(data[0], mesh))
    engine = build(schedule, target, optimizer=optimizer, lr_scheduler=rate, microbatches=2, **options)
    found = trained(engine, [my_part(batch, mesh) for batch in data])
    optimizer = two_groups([p for p in reference.parameters() if p.requires_grad])
    return found, alone(optimizer, own_losses(reference, data), halved(optimizer))


def structures(rank: int, target: str, ranks: int, stages: int, options: dict[str, Any]) -> Losses:
    """Stages hand on more than hidden states, of batches of several shapes; an evaluation before each step."""
    mesh, data = mesh_of(pp=ranks), torch.randn(3, 8, 8)
    model, reference = twice(Skips)
    paths = [f"layers.{layer}" for layer in range(4 - stages, 3)]
    schedule = cut(model, mesh, {"x": data[0, :4], "mask": torch.ones(4, 8)}, *paths)
    engine = build(schedule, target, optimizer=adamw, microbatches=2, loss_fn=F.mse_loss, **options)
    optimizer, found, expected = adamw(reference.parameters()), [], []
    for rows, x in zip((8, 4, 8), data, strict=True):  # batches of another shape, and back
        batch, labels = {"x": x[:rows], "mask": (x[:rows] > 0).float()}, x[:rows].flip(-1)
        found += [engine.eval_batch(**batch, labels=labels).item(), engine.train_batch(**batch, labels=labels).item()]
        expected += alone(optimizer, [lambda: F.mse_loss(reference(**batch), labels)]) * 2  # noqa: B023
    engine.close()
    return found, expected


def frozen_modes(rank: int, target: str, options: dict[str, Any]) -> Losses:
    """A stage has none of a group's parameters, and a BatchNorm keeps its statistics."""
    x, (model, reference) = torch.randn(4, 4, 8), twice(Rated)
    schedule = cut(model, mesh_of(pp=2), {"x": x[0, :2]}, "layers.0")
    given: dict[str, Any] = {"optimizer": two_groups, "lr_scheduler": halved, "loss_fn": F.mse_loss, "microbatches": 2}
    found = trained(build(schedule, target, **given, **options), [{"x": each, "labels": each} for each in x])
    optimizer = two_groups(reference.parameters())
    return found, alone(optimizer, errors(reference, x), halved(optimizer))


def unreached(rank: int, target: str, options: dict[str, Any]) -> Losses:
    """The first stage gets a gradient of zeros."""
    x, (model, reference) = torch.randn(3, 4, 4), twice(Unused)
    schedule = cut(model, mesh_of(pp=2), {"x": x[0, :2]}, "first")
    engine = build(schedule, target, optimizer=plain, loss_fn=F.mse_loss, microbatches=2, **options)
    found = trained(engine, [{"x": each, "labels": each} for each in x])
    return found, alone(plain(reference.parameters()), errors(reference, x))


def half_sharded(rank: int, target: str, options: dict[str, Any]) -> Losses:
    """One stage has shards and the other has none."""
    x, (model, reference) = torch.randn(3, 4, 4), twice(Halves)
    schedule = create_schedule(model, mesh=mesh_of(pp=2, tp=2), example_inputs={"x": x[0, :2]}, plugins=PLUGINS)
    schedule.tensor_parallel({"up": "colwise", "down": "rowwise"})
    schedule["down"].cut_pipeline_stage()
    engine = build(schedule, target, optimizer=adamw, loss_fn=F.mse_loss, microbatches=2, **options)
    found = trained(engine, [{"x": each, "labels": each} for each in x])
    return found, alone(adamw(reference.parameters()), errors(reference, x))


# ---- cases: what an engine says


def parts_of_a_gradient(rank: int, target: str, options: dict[str, Any]) -> tuple[str, str]:
    """A step whose ranks have parts of a gradient each, and the step after it."""
    schedule = create_schedule(Gated(), mesh=mesh_of(tp=2), plugins=PLUGINS)
    schedule["up"].shard("weight", axis=0)
    schedule["up"].shard("bias", axis=0)
    schedule["up"].sync("bwd_post", "all_reduce")
    schedule["down"].shard("weight", axis=1)
    schedule["down"].sync("fwd_post", "all_reduce")
    engine = build(schedule, target, optimizer=adamw, loss_fn=F.mse_loss, check=False, **options)
    batch = {"x": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    messages = message_of(lambda: engine.train_batch(**batch)), message_of(lambda: engine.train_batch(**batch))
    engine.close()
    return messages


def started_apart(rank: int, target: str, layout: dict[str, int]) -> str:
    """Building where ranks made models of other weights."""
    mesh = mesh_of(**layout)
    torch.manual_seed(rank)
    schedule = create_schedule(Halves(), mesh=mesh, plugins=PLUGINS)
    if layout.get("tp", 1) > 1:
        schedule.tensor_parallel({"up": "colwise", "down": "rowwise"})
    return message_of(lambda: build(schedule, target, optimizer=adamw, loss_fn=F.mse_loss, check=False))


def without_optimizer(target: str, mesh: DeviceMesh) -> tuple[float, str]:
    """How far an evaluation is from that of one process, and what a step says."""
    batch = batches(mesh["dp"].size())[0]
    only: Any = build(scheduled(small("gpt2"), mesh, my_part(batch, mesh)), target)
    difference = abs(only.eval_batch(**my_part(batch, mesh)).item() - small("gpt2").eval()(**batch).loss.item())
    message = message_of(lambda: only.train_batch(**my_part(batch, mesh)))
    only.close()
    return difference, message


def frozen_after_build(target: str) -> list[str]:
    """A step, an evaluation of a model with a bias frozen since it was built, and a step when it is not any more."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = build(create_schedule(model, plugins=PLUGINS), target, optimizer=adamw, loss_fn=F.mse_loss)
    batch = {"input": torch.ones(2, 4), "labels": torch.ones(2, 4)}
    engine.train_batch(**batch)
    model[1].bias.requires_grad_(False)
    messages = [message_of(lambda: engine.train_batch(**batch)), message_of(lambda: engine.eval_batch(**batch))]
    model[1].bias.requires_grad_(True)
    messages.append(message_of(lambda: engine.train_batch(**batch)))
    engine.close()
    return messages


# ---- cases without a mesh and without a process group


def in_its_process(target: str) -> Losses:
    """One loss of a model in a process alone."""
    batch = batches(1)[0]
    engine = build(create_schedule(small("gpt2"), plugins=PLUGINS), target, optimizer=adamw, microbatches=2)
    found = trained(engine, [batch])
    assert not dist.is_initialized()
    return found, [small("gpt2")(**batch).loss.item()]


def complex_buffer(target: str, precision: str) -> Losses:
    """A model with a complex buffer, which stays complex."""
    x, (model, reference) = torch.randn(4, 4), twice(Turned)
    schedule = create_schedule(model, plugins=PLUGINS)
    engine = build(schedule, target, optimizer=adamw, loss_fn=F.mse_loss, precision=precision)
    found = trained(engine, [{"x": x, "labels": x}] * 3)
    return found, alone(adamw(reference.parameters()), errors(reference, [x] * 3))


def own_buffers(rank: int, target: str, path: str, options: dict[str, Any]) -> list[list[Any]]:
    """On one of two replicas: the loss of an evaluation and a statistic of its own, before a save and behind a load."""
    torch.manual_seed(0)
    mesh, x = mesh_of(dp=2), torch.randn(8, 4) * (1 + 9 * rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": x})
    engine: Any = build(schedule, target, optimizer=plain, loss_fn=F.mse_loss, **options)
    batch, found = {"input": x, "labels": torch.randn(8, 1)}, []
    for _ in range(3):
        engine.train_batch(**batch)

    def look() -> None:
        found.append([engine.eval_batch(**batch).item(), model[1].running_mean.tolist()])

    look()
    engine.save(path)
    engine.train_batch(**batch)
    engine.load(path)
    look()
    engine.close()
    return found


def check_own_buffers(first: list[list[Any]], second: list[list[Any]]) -> None:
    """Check the result of ``own_buffers``."""
    for before, after in (first, second):
        assert before == after
    assert first[0][1] != second[0][1]
