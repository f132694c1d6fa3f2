"""Between syncs that scatter and gather the sequence, code that needs the whole sequence is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, build, create_schedule, set_random_seed
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc

Inside = Callable[[torch.Tensor], torch.Tensor]
X = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    """Runs a function on ``[batch, sequence, width]``."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(4), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(self.norm(x))


class Model(nn.Module):
    def __init__(self, inside: Inside) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 4), Inner(inside), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.down(self.up(x).tanh())))


def _make_schedule(model: nn.Module, *, at_input: bool = False) -> Schedule:
    """The layer before scatters, or the module itself."""
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    if at_input:
        sch["inner"].sync("fwd_pre", "scatter", axis=1).sync("fwd_post", "all_gather", axis=1)["norm"].sync(
            "grad", "all_reduce"
        )
        return sch
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    sch["inner.norm"].sync("grad", "all_reduce")
    sch["inner"].sync("fwd_post", "all_gather", axis=1)
    return sch


def _shift(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[:, 1:], x[:, :1]), 1)


WRONG: dict[str, Inside] = {
    "mean": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "softmax": lambda x: x.softmax(1) * x,
    "cumsum": lambda x: x.cumsum(1),
    "cumsum from behind": lambda x: x.cumsum(-2),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "shift": _shift,
    "flip": lambda x: x.flip(1),
    "max": lambda x: x - x.max(1, keepdim=True).values,
    "conv1d": lambda x: functional.conv1d(x.mT, torch.arange(48.0).view(4, 4, 3), padding=1).mT,
}


def _wrong(rank: int) -> dict[str, str]:
    messages = {}
    for key, inside in WRONG.items():
        before = Model(inside)
        checked, at_input, unchecked = (copy.deepcopy(before) for _ in range(3))
        build(_make_schedule(checked))
        build(_make_schedule(at_input, at_input=True))
        try:
            checked(X)
        except BuildError as err:
            messages[key] = str(err)
        with pytest.raises(BuildError, match="a part of the output of 'inner'"):
            at_input(X)
        build(_make_schedule(unchecked), check=False)
        assert not torch.allclose(before(X), unchecked(X), atol=1e-4), key
    return messages


def test_code_that_needs_the_whole_sequence_is_an_error() -> None:
    messages = run_distributed(_wrong, 2)[0]
    assert sorted(messages) == sorted(WRONG)
    assert {key: message for key, message in messages.items() if "a part of the output of 'down'" not in message} == {}


RIGHT: tuple[Inside, ...] = (
    lambda x: x.softmax(-1) * x.mean(-1, keepdim=True),
    lambda x: functional.gelu(x[..., :2]).repeat(1, 1, 2),
    lambda x: x.view(x.shape[0], -1, 2, 2).transpose(1, 2).flip(-1).transpose(1, 2).reshape(x.shape),
    lambda x: x @ torch.ones(4, 4).triu() + torch.arange(4.0),
    lambda x: x.clamp(min=0).cumsum(-1),
)


def _right(rank: int) -> None:
    for inside in RIGHT:
        for at_input in (False, True):
            model = Model(inside)
            before = copy.deepcopy(model)
            build(_make_schedule(model, at_input=at_input))
            assert_equivalent(before, model, X)


def test_code_on_single_positions_is_no_error() -> None:
    run_distributed(_right, 2)


def _drops(rank: int) -> str:
    model = Model(nn.Dropout(0.5))
    build(_make_schedule(model))
    with pytest.raises(BuildError) as caught:
        model(X)
    set_random_seed(1, tp_rank=rank)
    forked = Model(nn.Dropout(0.5))
    sch = _make_schedule(forked)
    sch["inner.inside"].fork_rng()
    build(sch)
    forked(X)
    return str(caught.value)


def test_equal_dropout_masks_of_sequence_shards_are_refused() -> None:
    assert "dropout draws the same random numbers on every rank" in run_distributed(_drops, 2)[0]


def _beside_dtensor(rank: int) -> None:
    """The same operation and layout, which DTensor caches, on a mesh of the user's."""
    model = Model(RIGHT[0])
    build(_make_schedule(model))
    model(X)
    parts = distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(1)])
    with implicit_replication():
        normed = functional.layer_norm(parts, (4,), model.inner.norm.weight, model.inner.norm.bias)
    assert torch.allclose(normed.redistribute(placements=[Replicate()]).to_local(), functional.layer_norm(X, (4,)))


def test_dtensors_of_the_user_are_not_affected() -> None:
    run_distributed(_beside_dtensor, 2)
