"""Real Transformers models train as without checkpoints, with dropout, whatever is kept and whichever attention they run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import slapo_memory.plugin
import slapo_sharding.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, create_schedule, set_random_seed
from slapo_testing import run_distributed
from tests.zoo.families import FAMILIES, layers

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_memory.plugin, slapo_sharding.plugin])
POLICIES: dict[str, dict[str, Any]] = {
    "all": {},
    "matmuls": {"policy": "matmuls"},
    "operators": {"policy": [torch.ops.aten.bmm.default, torch.ops.aten.native_layer_norm.default]},
    "draws": {"policy": [torch.ops.aten.native_dropout.default, torch.ops.aten._softmax.default]},
    "budget": {"budget": 0.5},
}


def lists(model: nn.Module) -> list[str]:
    """Paths of the lists of layers."""
    return sorted({path.rpartition(".")[0] for path in layers(model)})


def alone(sch: Schedule, options: dict[str, Any]) -> None:
    for path in lists(sch.mod):
        sch[path].checkpoint(**options)


def some(sch: Schedule, options: dict[str, Any]) -> None:
    for path in lists(sch.mod):
        sch[path].checkpoint(ratio=0.5, **options)


def nested(sch: Schedule, options: dict[str, Any]) -> None:
    for path, module in list(sch.mod.named_modules()):
        if type(module).__name__.endswith(("Attention", "MLP", "LayerFF")):
            sch[path].checkpoint(**options)
    alone(sch, options)
    sch.checkpoint(**options)


def offloaded(sch: Schedule, options: dict[str, Any]) -> None:
    alone(sch, options)
    for path in lists(sch.mod):
        sch[path].offload(min_bytes=0)


PLACES = {"alone": alone, "ratio": some, "nested": nested, "offload": offloaded}


def run_step(model: nn.Module, batch: dict[str, Any], autocast: bool = False) -> list[torch.Tensor | None]:
    """The loss, the logits and the gradients of a step, and a number drawn after it."""
    model.zero_grad()
    set_random_seed(11, tp_rank=torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        out = model(**batch)
    out.loss.backward()
    return [out.loss.detach(), out.logits.detach(), *(p.grad for p in model.parameters()), torch.rand(1)]


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def pair(name: str, attention: str) -> tuple[nn.Module, Schedule, dict[str, Any]]:
    family = FAMILIES[name]
    before, batch = family.model(dropout=0.2), family.batch()
    before.set_attn_implementation(attention)
    return before, create_schedule(copy.deepcopy(before), example_inputs=batch, plugins=PLUGINS), batch


def table() -> Iterator[Any]:
    fast = {("gpt2", "sdpa", "matmuls", "alone"), ("llama", "eager", "budget", "nested")}
    for name in ("gpt2", "llama", "bert", "t5"):
        for attention in ("sdpa", "eager"):
            for policy in POLICIES:
                for place in PLACES:
                    cell = (name, attention, policy, place)
                    yield pytest.param(*cell, marks=[] if cell in fast else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "attention", "policy", "place"), [*table()])
def test_a_step_is_the_unmodified_models(name: str, attention: str, policy: str, place: str) -> None:
    before, sch, batch = pair(name, attention)
    PLACES[place](sch, POLICIES[policy])
    for autocast in (False, True):
        assert_same(run_step(sch.mod, batch, autocast), run_step(before, batch, autocast))


def split(rank: int, name: str, attention: str, policy: str, checkpoint_first: bool, place: str) -> bool:
    """Two ranks: a split model with checkpoints steps as one without."""
    before, sch, batch = pair(name, attention)
    reference = create_schedule(before, example_inputs=batch, plugins=PLUGINS)
    reference.tensor_parallel()
    if policy != "budget":  # its run needs no states
        set_random_seed(5, tp_rank=rank)
    steps: list[Callable[[], Any]] = [lambda: PLACES[place](sch, POLICIES[policy]), sch.tensor_parallel]
    for step in steps if checkpoint_first else steps[::-1]:
        step()
    assert_same(run_step(sch.mod, batch), run_step(reference.mod, batch))
    return True


def split_table() -> Iterator[Any]:
    fast = ("llama", "eager", "budget", False, "alone")
    for name in ("gpt2", "llama", "bert", "t5"):
        for policy in POLICIES:
            for checkpoint_first in (True, False) if name == "llama" else (False,):  # a derived plan says no
                for attention, place in (("eager", "alone"), ("sdpa", "nested")):
                    cell = (name, attention, policy, checkpoint_first, place)
                    yield pytest.param(*cell, marks=[] if cell == fast else [pytest.mark.slow])


@pytest.mark.multiproc
@pytest.mark.parametrize(("name", "attention", "policy", "checkpoint_first", "place"), [*split_table()])
def test_correctness_12_over_two_ranks_dropouts_draw_the_same(
    name: str, attention: str, policy: str, checkpoint_first: bool, place: str
) -> None:
    assert run_distributed(split, 2, name, attention, policy, checkpoint_first, place, timeout=100) == [True, True]
