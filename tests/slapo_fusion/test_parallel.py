"""Compiled layers that are sharded, checkpointed and cut into stages train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_fusion.plugin
import slapo_memory.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_torch.layouts import adamw, mesh_of

pytestmark = [pytest.mark.multiproc, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]

PLUGINS = Registry(
    [
        slapo_tracing.plugin,
        slapo_training.plugin,
        slapo_fusion.plugin,
        slapo_memory.plugin,
        slapo_pipeline.plugin,
        slapo_sharding.plugin,
        slapo_torch.plugin,
    ]
)


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
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def trained(rank: int, layout: dict[str, int], checkpoints: bool) -> tuple[list[float], list[float], int]:
    """Losses of three steps, those of one process, and how many graphs were compiled."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    mesh, data = mesh_of(**layout), torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    schedule = create_schedule(Model(), mesh=mesh, example_inputs={"x": data[0, :2]}, plugins=PLUGINS)
    if layout.get("tp", 1) > 1:
        schedule.tensor_parallel({"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    schedule["layers"].compile(backend=counting)
    if checkpoints:
        schedule["layers"].checkpoint(ratio=0.5)
    if layout.get("pp", 1) > 1:
        schedule["layers.1"].cut_pipeline_stage()
    engine = build(schedule, "torch", optimizer=adamw, loss_fn=F.mse_loss, microbatches=2)
    found = [engine.train_batch(x=each, labels=each).item() for each in data]
    engine.close()
    reference = Model()
    optimizer, expected = adamw(reference.parameters()), []
    for each in data:
        optimizer.zero_grad()
        loss = F.mse_loss(reference(each), each)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return found, expected, len(graphs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_compiled_layers_in_parallel(layout: dict[str, int], checkpoints: bool) -> None:
    for found, expected, graphs in run_distributed(trained, 2, layout, checkpoints, timeout=100):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        assert graphs
