"""Layers with a budget and offloaded ones train in stages and in parts as one process does, with micro-batches in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import slapo_memory.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, build, create_schedule
from slapo_memory.forward_wrappers import cpu_offload
from slapo_testing import run_distributed
from tests.slapo_torch.layouts import adamw, mesh_of

pytestmark = pytest.mark.multiproc

PLUGINS = Registry(
    [
        slapo_tracing.plugin,
        slapo_training.plugin,
        slapo_memory.plugin,
        slapo_pipeline.plugin,
        slapo_sharding.plugin,
        slapo_torch.plugin,
    ]
)
STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "budget": {"checkpoint": {"budget": 0.5}},
    "offload": {"offload": {"min_bytes": 0}},
    "both": {"offload": {"min_bytes": 0}, "checkpoint": {"budget": 0.5}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def budget_error(rank: int) -> str:
    """Return the error of a budget for layers of DTensors; one that was given before works."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    reference, model, late = Model(), Model(), Model()
    sch = create_schedule(model, example_inputs=(x,), plugins=PLUGINS)
    sch["layers"].checkpoint(budget=0.5)
    for each in (model, late):
        for layer in each.layers:
            parallelize_module(layer, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for each in (reference, model):
        each(x).sum().backward()
    found = model.layers[0].up.weight.grad.full_tensor()
    torch.testing.assert_close(found, reference.layers[0].up.weight.grad)
    with pytest.raises(ScheduleError) as error:
        create_schedule(late, example_inputs=(x,), plugins=PLUGINS)["layers"].checkpoint(budget=0.5)
    return str(error.value)


def test_a_budget_is_given_before_weights_are_dtensors() -> None:
    for told in run_distributed(budget_error, 2, timeout=100):
        assert "'layers.0.up.weight' is a DTensor" in told
        assert "call checkpoint(budget=...) before the model is parallelized" in told


def trained(rank: int, layout: dict[str, int], steps: dict[str, dict[str, Any]]) -> tuple[list[float], list[float], int]:
    """Losses of three steps, those of one process, and how often this rank moved something."""
    moved: list[Any] = []
    plain = cpu_offload._CpuCopy.fetch
    cpu_offload._CpuCopy.fetch = lambda self: moved.append(self) or plain(self)
    try:
        mesh, data = mesh_of(**layout), torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
        schedule = create_schedule(Model(), mesh=mesh, example_inputs={"x": data[0, :2]}, plugins=PLUGINS)
        if layout.get("tp", 1) > 1:
            schedule.tensor_parallel({"layers.*.up": "colwise", "layers.*.down": "rowwise"})
        for name, options in steps.items():
            schedule["layers"].apply(name, **options)
        if layout.get("pp", 1) > 1:
            schedule["layers.1"].cut_pipeline_stage()
        engine = build(schedule, "torch", optimizer=adamw, loss_fn=F.mse_loss, microbatches=2)
        found = [engine.train_batch(x=each, labels=each).item() for each in data]
        engine.close()
    finally:
        cpu_offload._CpuCopy.fetch = plain
    reference = Model()
    optimizer, expected = adamw(reference.parameters()), []
    for each in data:
        optimizer.zero_grad()
        loss = F.mse_loss(reference(each), each)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return found, expected, len(moved)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps", STEPS.values(), ids=[*STEPS])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_training_in_parallel(layout: dict[str, int], steps: dict[str, dict[str, Any]]) -> None:
    for found, expected, moved in run_distributed(trained, 2, layout, steps, timeout=100):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        assert bool(moved) is ("offload" in steps)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv1d(4, 8, 1, bias=False), nn.BatchNorm1d(8), nn.Conv1d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.norm(self.up(x))))


def normed(rank: int) -> None:
    """A split norm in a checkpointed block, whose statistics advance once, at the first run after a build."""
    torch.manual_seed(0)
    reference, model = nn.Sequential(Normed()), nn.Sequential(Normed())
    model.load_state_dict(reference.state_dict())
    schedule = create_schedule(model, mesh=mesh_of(tp=2), plugins=PLUGINS)
    block = schedule["0"]
    block["up"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    block["norm"].shard("weight", axis=0)
    block["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    block.checkpoint()
    build(schedule)
    x = torch.randn(3, 4, 5)
    expected, found = reference(x), model(x)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    gradients = schedule.full_state("grad")
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)
    for name, buffer in schedule.full_state("buffer").items():
        torch.testing.assert_close(buffer, reference.get_buffer(name))


def test_a_checkpointed_block_with_a_split_norm() -> None:
    run_distributed(normed, 2)
