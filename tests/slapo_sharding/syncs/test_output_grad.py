"""``sync(tensor_parallel_output_grad=...)`` on a gathered sequence before a sharded and a replicated layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed


class Block(nn.Module):
    """A model whose norm and MLP may run on a sharded sequence, with a head that needs the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.up, self.down = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.last(x + self.down(torch.tanh(self.up(self.norm(x))))))


def make_schedule(model: nn.Module, inside: bool | None, behind: bool | None) -> Schedule:
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["embed"].sync("fwd_post", "scatter", axis=1)
    sch["norm"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=1, tensor_parallel_output_grad=inside)
    sch["up"].shard(["weight", "bias"], axis=0)
    sch["down"].shard("weight", axis=1).sync(mode="fwd_post", sync_op_or_fn="reduce_scatter", axis=1)
    sch["last"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=1, tensor_parallel_output_grad=behind)
    for norm in ("norm", "last"):
        sch[norm].sync("grad", "all_reduce")
    return sch


def far(inside: bool, behind: bool | None) -> tuple[float, list[str]]:
    """Return the difference of the output from the unmodified model's, and the parameters with other gradients."""
    torch.manual_seed(0)
    reference = Block()
    ids = torch.randint(16, (3, 4))
    sch = make_schedule(copy.deepcopy(reference), inside, behind)
    model, _ = build(sch, check=False)
    outputs = [each(ids) for each in (reference, model)]
    for each in outputs:
        each.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    found = {name: parameter.grad for name, parameter in sch["norm"].mod.named_parameters(prefix="norm")}
    found |= {name: parameter.grad for name, parameter in sch["embed"].mod.named_parameters(prefix="embed")}
    found |= {name: parameter.grad for name, parameter in sch["last"].mod.named_parameters(prefix="last")}
    wrong = [name for name, grad in found.items() if not torch.allclose(grad, wanted[name], rtol=1e-4, atol=1e-5)]
    return float((outputs[0] - outputs[1]).abs().max()), wrong


def flags(rank: int) -> list[tuple[float, list[str]]]:
    return [far(True, False), far(True, None), far(False, False)]


@pytest.mark.multiproc
def test_the_gradient_of_a_gathered_output_is_summed_or_split_as_the_flag_says() -> None:
    for right, default, wrong in run_distributed(flags, 2):
        assert max(each[0] for each in (right, default, wrong)) < 1e-5
        assert right[1] == []
        assert default[1] == []  # what is left out is False behind a module
        assert wrong[1]  # each rank's part of the gradient of a split layer has to be summed


def whole(rank: int) -> list[str]:
    """Return the gathered gradients of all parameters, with the checks on."""
    torch.manual_seed(0)
    reference = Block()
    ids = torch.randint(16, (3, 4))
    sch = make_schedule(copy.deepcopy(reference), True, False)
    model, _ = build(sch)
    for each in (reference, model):
        each(ids).square().sum().backward()
    found = sch.full_state("grad")
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    return [name for name, grad in wanted.items() if not torch.allclose(found[name], grad, rtol=1e-4, atol=1e-5)]


@pytest.mark.multiproc
def test_all_gradients_are_the_unmodified_models() -> None:
    assert run_distributed(whole, 2) == [[], []]


@pytest.mark.parametrize(
    ("op", "axis", "options", "message"),
    [
        ("all_gather", 1, {"tensor_parallel_output_grad": 1}, "tensor_parallel_output_grad is 1 for 'all_gather'"),
        (
            "all_reduce",
            None,
            {"tensor_parallel_output_grad": True},
            "is True for 'all_reduce'.*give True or False for 'all_gather'",
        ),
        ("all_gather", 1, {"tensor_parallel_output_grad": True, "backward": "split"}, "with backward='split'; give"),
    ],
)
def test_the_flag_is_of_all_gather_and_alone(op: str, axis: int | None, options: dict[str, object], message: str) -> None:
    sch = create_schedule(Block(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    with pytest.raises(ScheduleError, match=message):
        sch["norm"].sync("fwd_post", op, axis=axis, **options)
    assert not sch.journal
