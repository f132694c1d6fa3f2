"""The norm of gradients counts sharded parameters over the group and replicated ones once."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_training.distributed import clip_grad_norm_
from slapo_training.distributed.gradients import total_grad_norm

pytestmark = pytest.mark.multiproc


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Embedding(8, 4), nn.LayerNorm(4))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model[3].bias.grad = None
    return model


def _sharded() -> nn.Module:
    sch = create_schedule(_model(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["0"].shard("weight", axis=0)
    sch["1"].shard("weight", axis=1)
    sch["2"].shard("weight", axis=0)
    return sch.mod


def _clips_like_torch(rank: int) -> None:
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        for max_norm in (0.5, 1e6):
            before, after = _model(), _sharded()
            expected = nn.utils.clip_grad_norm_(before.parameters(), max_norm, norm_type)
            torch.testing.assert_close(clip_grad_norm_(after.parameters(), max_norm, norm_type), expected.double())
            torch.testing.assert_close(after[3].weight.grad, before[3].weight.grad)
            torch.testing.assert_close(after[0].bias.grad, before[0].bias.grad.chunk(dist.get_world_size())[rank])
            torch.testing.assert_close(after[1].bias.grad, before[1].bias.grad)


@pytest.mark.parametrize("ranks", [2, 4])
def test_correctness_11_clipping_equals_the_unmodified_model_s(ranks):
    run_distributed(_clips_like_torch, ranks)


def _stages(rank: int) -> None:
    """Two stages of one parameter each, and one they share."""
    own, shared = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    own.grad, shared.grad = torch.full((3,), 1.0 + rank), torch.full((2,), 4.0)
    for norm_type, expected in ((2.0, math.sqrt(3 * 1 + 3 * 4 + 2 * 16)), (math.inf, 4.0)):
        total = total_grad_norm(
            [own, shared],
            norm_type,
            extra_groups=[dist.group.WORLD],
            counts=lambda parameter: parameter is own or rank == 0,
        )
        assert total.item() == pytest.approx(expected)
    empty = total_grad_norm([] if rank else [own], extra_groups=[dist.group.WORLD])
    assert empty.item() == pytest.approx(math.sqrt(3))


def test_correctness_11_stages_add_up_and_a_shared_parameter_counts_once():
    run_distributed(_stages, 2)


def test_no_gradients_have_norm_zero():
    assert total_grad_norm([nn.Parameter(torch.zeros(2))]).item() == 0.0
    assert total_grad_norm([]).item() == 0.0


def test_half_precision_gradients_do_not_overflow():
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert clip_grad_norm_([parameter], 1.0).item() == pytest.approx(120000.0, rel=1e-3)
    assert parameter.grad.tolist() == pytest.approx([0.5] * 4, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_gradients_of_every_type_are_clipped(dtype: torch.dtype):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3, dtype=dtype))]
    for parameter in ours:
        parameter.grad = torch.randn_like(parameter)
    theirs = copy.deepcopy(ours)
    for parameter, other in zip(ours, theirs, strict=True):
        other.grad = parameter.grad.clone()
    expected = nn.utils.clip_grad_norm_(theirs, 0.1)
    assert clip_grad_norm_(ours, 0.1).item() == pytest.approx(expected.item(), rel=1e-6)
    for parameter, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def _types_differ(rank: int) -> float:
    own = nn.Parameter(torch.zeros(2, dtype=torch.float64 if rank else torch.float32))
    own.grad = torch.ones_like(own)
    return clip_grad_norm_([own], 1.0, extra_groups=[dist.group.WORLD]).item()


def test_ranks_may_have_gradients_of_different_types():
    assert run_distributed(_types_differ, 2) == [pytest.approx(2.0)] * 2
