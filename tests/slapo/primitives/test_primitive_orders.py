"""Every order of primitives builds and is right: traces before, between and after cuts, checkpoints, kernels and the rest."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import slapo
from slapo_testing import run_distributed
from tests.slapo.primitive_orders import STEPS, Order, batch, gradients, make, plain_losses

BATCHES = [batch(), batch(1, rows=3, length=7), batch(2, rows=1)]
FAST = frozenset({0, 2, 4, 5, 8, 10, 11, 16, 17, 18, 20, 23})
"""Orders that have every step, traces before and after cuts, and every model."""


def seeds(fast: Collection[int], count: int) -> list[Any]:
    return [pytest.param(seed, marks=() if seed in fast else pytest.mark.slow) for seed in range(count)]


def structure(model: torch.nn.Module) -> list[Any]:
    return [(name, type(module), id(module)) for name, module in model.named_modules()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", seeds(FAST, 200))
def test_an_order_builds_is_right_can_be_undone_and_replayed(seed: int, tmp_path: Any) -> None:
    order = Order(seed)
    plain, model = make(order.model), make(order.model)
    inputs = order.draw.choice([BATCHES[0], ((BATCHES[0]["input_ids"],), {"labels": BATCHES[0]["labels"]})])
    sch = slapo.create_schedule(model, example_inputs=inputs)
    assert order.apply(sch) == []
    program = slapo.build_program(sch)
    expected = [gradients(plain, plain, each) for each in BATCHES]
    torch.testing.assert_close([gradients(program, sch.root_module, each) for each in BATCHES], expected, rtol=1e-4, atol=1e-5)
    sch.root_module.eval(), plain.eval()
    torch.testing.assert_close(sch.root_module(**BATCHES[1])["loss"], plain(**BATCHES[1])["loss"], rtol=1e-4, atol=1e-5)
    sch.root_module.train(), plain.train()
    copied = copy.deepcopy(sch.root_module)
    torch.testing.assert_close(gradients(copied, copied, BATCHES[1]), expected[1], rtol=1e-4, atol=1e-5)
    assert_replays(sch, order, inputs, tmp_path / "schedule.json", expected)
    assert_undone(order.model, inputs, seed)


def assert_replays(sch: slapo.Schedule, order: Order, inputs: Any, file: Any, expected: Any) -> None:
    sch.save(file)
    again = slapo.load_schedule(make(order.model), file, example_inputs=inputs)
    assert str(again.journal) == str(sch.journal)
    program = slapo.build_program(again)
    torch.testing.assert_close(gradients(program, again.root_module, BATCHES[0]), expected[0], rtol=1e-4, atol=1e-5)


def assert_undone(name: str, inputs: Any, seed: int) -> None:
    model = make(name)
    before = structure(model)
    order = Order(seed)
    order.draw.choice([1, 2])
    sch = slapo.create_schedule(model, example_inputs=inputs)
    order.apply(sch)
    while len(sch.journal):
        sch.undo()
    assert sch.root_module is model
    assert structure(model) == before
    plain = make(name)
    torch.testing.assert_close(gradients(model, model, BATCHES[1]), gradients(plain, plain, BATCHES[1]))


def test_the_orders_have_every_step() -> None:
    orders = [Order(seed) for seed in FAST]
    assert {order.model for order in orders} == {"gpt2", "llama", "plain"}
    assert {step for order in orders for step in order.steps} == set(STEPS)


def train(rank: int, seed: int, target: str, layout: tuple[int, int]) -> tuple[list[float], list[float], list[str]]:
    """Losses of three steps, of the engine and of the unmodified model, and what was refused."""
    order = Order(seed, cuts=False)
    pipeline, tensor = layout
    mesh = init_device_mesh("cpu", (pipeline, 1, tensor), mesh_dim_names=("pp", "dp", "tp"))
    batches = [batch(0, 4), batch(1, 4), batch(2, 4, length=8)]
    sch = slapo.create_schedule(make(order.model), mesh=mesh, example_inputs=batches[0])
    if tensor > 1 and order.model != "plain":  # whose attention counts on all heads
        order.steps = [step for step in order.steps if step not in ("checkpoint_mlp", "tensor_parallel")]
        order.steps.insert(order.draw.randrange(len(order.steps) + 1), "tensor_parallel")
    refused = order.apply(sch)
    if pipeline > 1:
        sch[f"{order.blocks}.1"].cut_pipeline_stage()
    engine = slapo.build(sch, target, optimizer=partial(torch.optim.SGD, lr=0.1), microbatches=2)
    losses = [float(engine.train_batch(**each)) for each in batches]
    engine.close()
    return losses, plain_losses(make(order.model), batches), refused


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "target", ["torch", pytest.param("deepspeed", marks=pytest.mark.slow), pytest.param("megatron", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("seed", seeds({0}, 30))
def test_an_order_trains_on_an_engine(seed: int, target: str) -> None:
    layout = [(1, 2), (2, 1), (2, 2)][seed % 3]
    losses, expected, refused = run_distributed(train, layout[0] * layout[1], seed, target, layout, timeout=100)[0]
    assert refused == []
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
