"""Dropout in a pipeline draws what each rank's random states give, in the order in which its stages run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_memory.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import (
    Registry,
    RNGState,
    Schedule,
    build,
    create_schedule,
    get_cuda_rng_tracker,
    rng_state,
    set_random_seed,
    set_rng_state,
)
from slapo_testing import run_distributed

from ..layouts import adamw, gpt2, mesh_of, tokens

pytestmark = pytest.mark.multiproc

PLUGINS = (
    slapo_tracing.plugin,
    slapo_training.plugin,
    slapo_memory.plugin,
    slapo_pipeline.plugin,
    slapo_sharding.plugin,
    slapo_torch.plugin,
)
MICROBATCHES = 4
LAYERS = 4
Order = list[tuple[int, int]]
"""Stages and micro-batches in the order in which a rank runs their forwards."""


def forks(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in the tracker's random state."""

    def forked(*args: Any, **kwargs: Any) -> Any:
        with get_cuda_rng_tracker().fork():
            return call(*args, **kwargs)

    return forked


class Replay:
    """The unmodified GPT-2 in one process, whose attention forks and whose layers may start from given random states."""

    def __init__(self, model: Any, stages: int) -> None:
        self._model, self._stages = model, stages
        self._given: dict[int, RNGState] = {}
        self._left: dict[int, RNGState] = {}
        layers = list(model.transformer.h)
        for stage in range(stages):
            start = layers[stage * LAYERS // stages] if stage else model
            start.register_forward_pre_hook(lambda *_, stage=stage: self._enter(stage))
        for layer in layers:
            layer.attn.forward = forks(layer.attn.forward)

    def _enter(self, stage: int) -> None:
        self._left[stage - 1] = rng_state()
        if stage in self._given:
            set_rng_state(self._given[stage])

    def loss(self, part: torch.Tensor, given: dict[int, RNGState]) -> torch.Tensor:
        """Return the loss of one micro-batch, with each stage run from its random state."""
        self._given = given
        loss: torch.Tensor = self._model(input_ids=part, labels=part).loss
        self._left[self._stages - 1] = rng_state()
        return loss

    @torch.no_grad()
    def states(self, order: Order, now: RNGState, part: torch.Tensor) -> tuple[dict[tuple[int, int], RNGState], RNGState]:
        """From which state each of a rank's forwards starts, and the one that the last leaves."""
        before = {}
        for stage, microbatch in order:
            before[stage, microbatch] = now
            self.loss(part, {stage: now})
            now = self._left[stage]
        return before, now


def _scheduled(model: nn.Module, example: torch.Tensor, stages: int, checkpointed: bool) -> Schedule:
    inputs = {"input_ids": example, "labels": example}
    schedule = create_schedule(model, mesh=mesh_of(pp=2), example_inputs=inputs, plugins=Registry(list(PLUGINS)))
    for index in range(LAYERS):
        schedule[f"transformer.h.{index}.attn"].fork_rng()
        if checkpointed:
            schedule[f"transformer.h.{index}"].checkpoint()
    for stage in range(1, stages):
        schedule[f"transformer.h.{stage * LAYERS // stages - 1}"].cut_pipeline_stage()
    return schedule


def _order(engine: Any) -> list[Order]:
    """Return the actions of all ranks in the last step."""
    forwards = sorted((each for each in engine.timeline if each["kind"] == "F"), key=lambda each: each["start"])
    orders: list[Any] = [None, None]
    dist.all_gather_object(orders, [(each["stage"], each["microbatch"]) for each in forwards])
    return orders


def _with_dropout(rank: int, kind: str, per_rank: int, checkpointed: bool) -> dict[str, float]:
    """Largest differences of losses and gradients over two steps, and how far the loss without dropout is."""
    set_random_seed(5)
    model, data, stages = gpt2(dropout=0.2, layers=LAYERS), tokens(1, steps=2), 2 * per_rank
    reference, without = copy.deepcopy(model), copy.deepcopy(model).eval()
    replay = Replay(reference, stages)
    schedule = _scheduled(model, data[0], stages, checkpointed)
    options = {"microbatches": MICROBATCHES, "pipeline_schedule": kind, "record_timeline": True}
    engine: Any = build(schedule, "torch", optimizer=adamw, **options)
    now = []
    for each in (0, 1):
        set_random_seed(5, pp_rank=each)
        now.append(rng_state())
    found = {"loss": 0.0, "gradient": 0.0, "without": float("inf")}
    optimizer, mine = adamw(reference.parameters()), now[rank]
    for batch in data:
        set_rng_state(mine)
        loss = engine.train_batch(input_ids=batch, labels=batch).item()
        mine, parts = rng_state(), batch.chunk(MICROBATCHES)
        given: dict[tuple[int, int], RNGState] = {}
        for each, order in enumerate(_order(engine)):
            before, now[each] = replay.states(order, now[each], parts[0])
            given |= before
        states = [{stage: given[stage, index] for stage in range(stages)} for index in range(MICROBATCHES)]
        optimizer.zero_grad()
        expected = torch.stack([replay.loss(part, each) for part, each in zip(parts, states, strict=True)]).mean()
        expected.backward()
        gradients = schedule.full_state("grad")
        off = [float((gradients[name] - p.grad).abs().max()) for name, p in reference.named_parameters()]
        found["loss"] = max(found["loss"], abs(loss - expected.item()))
        found["gradient"] = max(found["gradient"], *off)
        found["without"] = min(found["without"], abs(loss - without(input_ids=batch, labels=batch).loss.item()))
        optimizer.step()
        without.load_state_dict(reference.state_dict())
    engine.close()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "per_rank", "checkpointed"),
    [
        ("1f1b", 1, True),
        ("zbv", 2, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("1f1b", 1, False), ("interleaved", 2, True), ("interleaved", 2, False), ("zbv", 2, True)]
        ),
    ],
)
def test_masks_are_those_of_each_ranks_states_and_again_in_a_recompute(kind: str, per_rank: int, checkpointed: bool) -> None:
    for found in run_distributed(_with_dropout, 2, kind, per_rank, checkpointed, timeout=100.0):
        assert found["loss"] < 1e-5
        assert found["gradient"] < 1e-5
        assert found["without"] > 1e-4
