"""``pipeline`` on a mesh: stages for its ranks, of models that are split and checkpointed too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from slapo_core import ScheduleError, build, build_program, create_schedule
from slapo_testing import run_distributed

from ..test_transformers import SIZES, TEXT, _model
from .test_pipeline import X, mlp, table


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two pipeline ranks, of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    dist.destroy_process_group()


def test_a_stage_per_rank_unless_more_are_asked_for(mesh: DeviceMesh) -> None:
    schedule = create_schedule(mlp(8, 8, 8, 8), example_inputs=X, mesh=mesh).pipeline()
    assert table(schedule).cuts == ("1",)
    schedule.undo()
    schedule.pipeline(4)
    assert len(build_program(schedule).stages) == 4


@pytest.mark.parametrize("arguments", [{"stages": 3}, {"boundaries": ["0", "1"]}, {"boundaries": lambda path, _: path in "01"}])
def test_stages_that_ranks_cannot_share(mesh: DeviceMesh, arguments: dict[str, Any]) -> None:
    schedule = create_schedule(mlp(8, 8, 8, 8), example_inputs=X, mesh=mesh)
    with pytest.raises(ScheduleError, match="3 stages cannot be shared equally by the 2 ranks of the mesh's axis 'pp'"):
        schedule.pipeline(**arguments)
    assert not len(schedule.journal)


def _trained(rank: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model, plain = (_model("LlamaForCausalLM", **SIZES, num_key_value_heads=1, use_cache=False) for _ in range(2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    schedule = create_schedule(model, mesh=mesh, example_inputs={name: value[:1] for name, value in TEXT.items()}).pipeline()
    engine: Any = build(schedule, "torch", optimizer=partial(torch.optim.SGD, lr=0.5), microbatches=2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    found, expected = [], []
    for _ in range(3):
        found.append(float(engine.train_batch(**TEXT)))
        parts = [{name: value[row : row + 1] for name, value in TEXT.items()} for row in range(2)]
        loss = torch.stack([plain(**part).loss for part in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))
    engine.close()
    return found, expected


@pytest.mark.multiproc
def test_two_processes_train_it() -> None:
    for found, expected in run_distributed(_trained, 2):
        assert found == pytest.approx(expected, abs=1e-5)
        assert expected[0] > expected[-1]


@pytest.fixture
def grid() -> Iterator[DeviceMesh]:
    """Two pipeline ranks times two tensor-parallel ones, of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("first", ["pipeline", "parts"])
def test_on_a_model_that_is_split_and_checkpointed(first: str, grid: DeviceMesh) -> None:
    sizes = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "use_cache": False}
    costs = []
    for checkpointed in (False, True):
        schedule = create_schedule(_model("LlamaForCausalLM", **sizes), mesh=grid, example_inputs=TEXT)
        if first == "pipeline":
            schedule.pipeline(balance="memory")
        schedule.tensor_parallel()
        for layer in schedule.select("model.layers.*") if checkpointed else ():
            layer.checkpoint()
        if first == "parts":
            schedule.pipeline(balance="memory")
        held = [sum(p.numel() for p in stage.module.parameters()) for stage in build_program(schedule).stages]
        times = 2 if first == "pipeline" else 1
        assert [stage.parameters for stage in table(schedule).stages] == pytest.approx([times * n for n in held], rel=0.03)
        costs.append(max(stage.cost for stage in table(schedule).stages))
    assert (costs[1] < 0.7 * costs[0]) == (first == "parts")
