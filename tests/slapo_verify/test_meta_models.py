"""Models on the meta device are verified as copies with values; where the inputs go."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import slapo
from slapo_testing import run_distributed

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class MLP(nn.Module):
    """Two layers and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.again = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 12)
        self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x))) + self.again(x).sum()


def empty() -> MLP:
    with slapo.init_empty_weights():
        return MLP()


def test_a_block_of_steps_on_a_model_without_values() -> None:
    sch = slapo.create_schedule(empty())
    with slapo.init_empty_weights():
        new = nn.Linear(12, 8)
    with slapo.Verify(sch, [X]) as proof:
        sch["down"].replace(new)
    assert proof.report
    assert proof.report.compared["gradients"] == 6
    assert all(parameter.is_meta for parameter in sch.mod.parameters())
    assert sch.mod.again.weight is sch.mod.up.weight
    with pytest.raises(slapo.VerifyError, match=r"step to blame: 2: sch\['act'\].*SiLU"), slapo.Verify(sch, [X]):
        sch["act"].replace(nn.SiLU())
    assert all(parameter.is_meta for parameter in sch.mod.parameters())


def test_a_reference_without_values_has_those_of_the_scheduled_model_and_the_other_way_round() -> None:
    torch.manual_seed(0)
    real = MLP()
    sch = slapo.create_schedule(copy.deepcopy(real))
    sch["act"].replace(nn.GELU())
    hollow = empty()
    assert slapo.verify(hollow, sch, X)
    assert hollow.up.weight.is_meta
    sch["act"].replace(nn.ReLU())
    assert slapo.verify(hollow, sch, X).blame.step.startswith("2: ")
    bare = slapo.create_schedule(empty())
    assert slapo.verify(real, bare, X)
    bare["act"].replace(nn.ReLU())
    assert not slapo.verify(real, bare, X)


def test_values_that_nothing_tells() -> None:
    sch = slapo.create_schedule(empty())
    with slapo.init_empty_weights():
        odd = nn.Sequential(nn.Linear(12, 8))
    with (
        pytest.raises(slapo.VerifyError, match=r"a step brought in 'down.0.weight' on the meta device"),
        slapo.Verify(sch, [X]),
    ):
        sch["down"].replace(odd)
    bare = nn.Module()
    bare.scale = nn.Parameter(torch.ones(8, device="meta"))
    bare.forward = lambda x: x * bare.scale
    with pytest.raises(slapo.VerifyError, match="the reference is on the meta device, and the initialiser leaves scale"):
        slapo.Verify(slapo.create_schedule(bare), [X]).__enter__()


def split(rank: int) -> tuple[bool, str]:
    """A schedule of shards on a model without values: right, and without its last sum."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    right, wrong = (slapo.create_schedule(empty(), mesh=mesh) for _ in range(2))
    with slapo.Verify(right, [X]) as proof:
        right["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        right["again"].shard("bias", axis=0).sync("fwd_post", "all_gather", axis=-1)
        right["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    try:
        with slapo.Verify(wrong, [X]):
            wrong["down"].replace(nn.Linear(12, 8))
    except slapo.VerifyError as error:
        said = str(error)
    return bool(proof.report), said


@pytest.mark.multiproc
def test_shards_of_a_model_without_values() -> None:
    for is_right, said in run_distributed(split, 2):
        assert is_right
        assert said.startswith("NOT the same")
        assert "step to blame: 1: sch['down'].replace(" in said


def test_the_default_device_is_a_gpu_where_the_model_is_on_one() -> None:
    assert inspect.signature(slapo.Verify).parameters["device"].default == "cuda"
    sch = slapo.create_schedule(MLP())
    for device in ("cuda", None, "cpu", torch.device("cpu")):
        with slapo.Verify(sch, [X], device):
            sch["act"].replace(nn.GELU())


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:7", "device is 'cuda:7' and the model is on 'cpu'; move it there, or leave device out"),
        ("nowhere", "device is 'nowhere'; give the name of a device"),
        (3.5, "device is 3.5; give the name of a device"),
    ],
)
def test_a_device_that_the_model_is_not_on(device: Any, message: str) -> None:
    sch = slapo.create_schedule(MLP())
    with pytest.raises(slapo.VerifyError, match=message):
        slapo.Verify(sch, [X], device).__enter__()
    with slapo.Verify(sch, [X], device, True, False) as off:
        sch["act"].replace(nn.SiLU())
    assert off.report is None
