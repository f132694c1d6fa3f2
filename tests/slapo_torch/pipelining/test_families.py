"""Transformers classes train through pipeline schedules on several processes as the unmodified model does in one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_pipeline.families import places, small
from tests.zoo import families as zoo

from ..layouts import adamw, mesh_of

pytestmark = pytest.mark.multiproc

Layout = tuple[str, int, int]
"""A pipeline schedule, the number of ranks, and of stages on each."""

MICROBATCHES = 4
ROWS = 2 * MICROBATCHES
STEPS = 3
LIMIT = 100.0
LONG = 500.0

CLASSES = (
    # causal: tied, results that are views, ALiBi, rotary, grouped keys and values, mixtures of experts
    *("gpt2:mask", "opt", "bloom", "llama", "qwen3", "mixtral", "qwen3_moe"),
    # masked; the second uses one table of positions in all of its layers
    *("bert", "deberta-v2"),
    # sequence to sequence
    *("t5", "bart"),
    # images; gradients that lie in memory in another order, BatchNorm
    *("vit", "convnext", "resnet"),
)

QUICK = ("gpt2:mask", "llama", "mixtral", "bert", "t5", "resnet")
"""One of each kind."""

MORE = ("gpt_neox", "olmo2", "deepseek_v3", "gpt_oss", "roberta", "electra", "switch_transformers", "beit", "swin")


def batches(example: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """One per step, of the example's names and shapes but for the rows: padded unevenly, with labels left out unevenly."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield {name: _rows(name, value, generator) for name, value in example.items()}


def _rows(name: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape = (ROWS, *value.shape[1:])
    if value.is_floating_point():
        return torch.randn(shape, generator=generator)
    if name == "attention_mask":
        lengths = torch.randint(shape[1] // 2, shape[1] + 1, (ROWS, 1), generator=generator)
        return (torch.arange(shape[1]) < lengths).long()
    if value.dim() == 1:
        return torch.randint(0, 2, shape, generator=generator)
    ids = torch.randint(5, 64, shape, generator=generator)
    return ids.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100) if name == "labels" else ids


class Trained(NamedTuple):
    """The unmodified model in one process: losses, the first step's gradients, weights and buffers after the last."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def differences(rank: int, name: str, layouts: tuple[Layout, ...], deep: bool = False) -> dict[Layout, dict[str, float]]:
    """By layout: the largest of losses, of the first step's gradients, of weights and of buffers after all steps."""
    model, example = deeper(name) if deep else small(name)
    data = list(batches(example))
    alone = _train_alone(copy.deepcopy(model), data)
    return {layout: _differences(copy.deepcopy(model), data, alone, *layout) for layout in layouts}


def deeper(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A family's model with eight layers in all."""
    family = zoo.FAMILIES[name]
    model = family.model(depth=4 if family.inputs == "seq2seq" else 8)
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False
    return model, family.batch()


def _differences(
    model: nn.Module, data: list[dict[str, torch.Tensor]], alone: Trained, kind: str, ranks: int, per_rank: int
) -> dict[str, float]:
    parts = max(MICROBATCHES, ranks * per_rank)
    example = {key: value[: ROWS // parts] for key, value in data[0].items()}
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh_of(pp=ranks), example_inputs=example, plugins=plugins)
    for path in places(model, example, ranks * per_rank):
        schedule[path].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=adamw, microbatches=parts, pipeline_schedule=kind)
    losses = [engine.train_batch(**data[0]).item()]
    gradient = _largest({name: p.grad for name, p in _parameters(engine.module).items()}, alone.gradients)
    losses += [engine.train_batch(**batch).item() for batch in data[1:]]
    worst = {
        "loss": max(abs(found - expected) for found, expected in zip(losses, alone.losses, strict=True)),
        "gradient": gradient,
        "weight": _largest(_parameters(engine.module), alone.weights),
        "buffer": _largest(dict(engine.module.named_buffers()), alone.buffers),
    }
    everywhere: list[Any] = [None] * ranks
    dist.all_gather_object(everywhere, {*_parameters(engine.module), *dict(engine.module.named_buffers())})
    assert set().union(*everywhere) == {*alone.weights, *alone.buffers}
    engine.close()
    return worst


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A tied one stands under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _train_alone(model: nn.Module, data: list[dict[str, torch.Tensor]]) -> Trained:
    optimizer, losses, gradients = adamw(model.parameters()), [], {}
    for batch in data:
        optimizer.zero_grad()
        losses.append(_backward(model, batch))
        gradients = gradients or {name: parameter.grad for name, parameter in _parameters(model).items()}
        optimizer.step()
    return Trained(losses, gradients, dict(_parameters(model)), dict(model.named_buffers()))


def _backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """The loss of the whole batch; where statistics of a batch are taken, the mean of its micro-batches'."""
    parts = MICROBATCHES if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) else 1
    chunks = zip(*(value.chunk(parts) for value in batch.values()), strict=True)
    losses = [model(**dict(zip(batch, chunk, strict=True))).loss for chunk in chunks]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item()


def _largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of what this rank has; what has no gradient has none on either side."""
    pairs = [(mine, expected[name]) for name, mine in found.items() if mine is not None or expected[name] is not None]
    return max((float((one.detach().double() - other.detach().double()).abs().max()) for one, other in pairs), default=0.0)


def _assert_small(found: list[dict[Layout, dict[str, float]]]) -> None:
    for each in found:
        wrong = {layout: worst for layout, worst in each.items() if not all(value < 1e-5 for value in worst.values())}
        assert not wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*CLASSES, *MORE)])
def test_a_class_trains_as_in_one_process(name: str) -> None:
    _assert_small(run_distributed(differences, 2, name, (("1f1b", 2, 1), ("interleaved", 2, 2), ("zbv", 2, 2)), timeout=LIMIT))


@pytest.mark.slow
@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_trains_on_four_processes_as_in_one(name: str) -> None:
    _assert_small(run_distributed(differences, 4, name, (("1f1b", 4, 1), ("zero_bubble", 4, 1)), timeout=LONG))
    _assert_small(run_distributed(differences, 2, name, (("zero_bubble", 2, 2), ("dualpipev", 2, 2)), timeout=LONG))


@pytest.mark.slow
@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3_moe", "bert", "t5", "bart"])
def test_eight_stages_on_four_processes(name: str) -> None:
    layouts = tuple((kind, 4, 2) for kind in ("interleaved", "zero_bubble", "zbv"))
    _assert_small(run_distributed(differences, 4, name, layouts, True, timeout=LONG))


def test_there_are_enough_classes() -> None:
    assert len(CLASSES) >= 14
