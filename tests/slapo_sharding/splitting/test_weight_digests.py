"""Ranks that made different models are refused in the first run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc

X = torch.ones(3, 4)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4, bias=False))


def _make_schedule(model: nn.Module) -> Schedule:
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return sch


def _made(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def _different(rank: int) -> list[str]:
    messages = []
    whole, split, unchecked = _made(0), _made(0), _made(rank)
    with torch.no_grad():
        whole[0].weight[-1, -1] += rank
        split[1].bias[0] += rank
    for model in (whole, split, _made(rank)):
        build(_make_schedule(model))
        with pytest.raises(BuildError) as caught:
            model(X)
        messages.append(str(caught.value))
    build(_make_schedule(unchecked), check=False)
    unchecked(X)
    return messages


def test_different_models_are_an_error_on_every_rank() -> None:
    messages = run_distributed(_different, 2)
    assert messages[0] == messages[1]
    for message, name in zip(messages[0], ("0.weight", "1.bias", "0.weight"), strict=True):
        assert f"the ranks do not split the same model: {name!r} had different values on one of them" in message


def _run_after_load(rank: int) -> None:
    """Weights that were loaded after scheduling, or trained, are compared as they are."""
    model = _made(rank)
    reference = _made(5)
    sch = _make_schedule(model)
    build(sch)
    state = reference.state_dict()
    for name, tensor in sch.mod.state_dict().items():
        whole = state[name]
        dim = next((dim for dim in range(whole.dim()) if whole.shape[dim] != tensor.shape[dim]), None)
        tensor.copy_(whole if dim is None else whole.chunk(2, dim)[rank])
    assert_equivalent(copy.deepcopy(reference), model, X)


def test_weights_that_are_loaded_after_scheduling_are_not_refused() -> None:
    run_distributed(_run_after_load, 2)


def _written(rank: int) -> None:
    """A rank modifies its own shard, and weights are written in ways that torch does not count."""
    model = _made(0)
    build(_make_schedule(model))
    with torch.no_grad():
        model[1].bias[0] += rank
    model(X)
    model = _made(rank)
    build(_make_schedule(model))
    for name, parameter in model.named_parameters():
        other = torch.full(parameter.shape, 0.25)
        if name == "0.weight":
            parameter.data = other
        else:
            parameter.data.copy_(other)
    model(X)


def test_modified_shards_are_not_compared() -> None:
    run_distributed(_written, 2)


def _run_after_training(rank: int) -> None:
    """Changes on single ranks after the first run, or in another mode, are not compared."""
    model = _made(0)
    build(_make_schedule(model))
    model.eval()(X).sum().backward()
    with torch.no_grad():
        model[0].bias += rank
    model.train()(X)


def test_weights_are_compared_once() -> None:
    run_distributed(_run_after_training, 2)
