"""A tied parameter is sharded once, in every order of calls; facts stay with a sharded parameter."""

from __future__ import annotations

import copy
import io
import re
from itertools import permutations

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, ScheduleError, build, create_schedule, parameter_facts, shard_spec
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_training.distributed import clip_grad_norm_
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


class Tied(nn.Module):
    """An embedding and a head with one weight; the head may have a bias."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(12, 4)
        self.head = nn.Linear(4, 12, bias=bias)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.wte(ids)))


def _schedule(module: nn.Module) -> Schedule:
    return create_schedule(module, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))


STEPS = (
    lambda sch: sch["wte"].shard("weight", axis=0),
    lambda sch: sch["head"].shard("weight", axis=0),
    lambda sch: sch["wte"].sync("fwd_post", "all_reduce"),
    lambda sch: sch["head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1),
)


def _every_order(rank: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(12, (2, 5))
    for order in permutations(range(4)):
        for left_out in (None, 0, 1):  # one call shards the tie for both
            model = Tied(bias=True)
            before = copy.deepcopy(model)
            sch = _schedule(model)
            for index in order:
                if index != left_out:
                    STEPS[index](sch)
            build(sch)
            assert model.wte.weight is model.head.weight
            assert tuple(model.wte.weight.shape) == (6, 4)
            assert (model.wte.num_embeddings, model.head.out_features, len(model.head.bias)) == (6, 6, 6)
            assert_equivalent(before, model, ids)


def test_correctness_06_a_tie_is_sharded_once_in_every_order():
    run_distributed(_every_order, 2)


def _late_holder(rank: int) -> None:
    """A module that ties a sharded parameter later is sharded by its own step, the others only once."""
    model = Tied()
    before = copy.deepcopy(model)
    sch = _schedule(model)
    sch["wte"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    late = nn.Linear(4, 12, bias=False)
    late.weight = model.wte.weight
    sch["head"].replace(late)
    sch["head"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
    build(sch)
    assert (model.wte.num_embeddings, late.out_features) == (6, 6)
    assert_equivalent(before, model, torch.randint(12, (2, 5)))


def test_correctness_06_a_holder_that_comes_later_is_sharded_in_its_turn():
    run_distributed(_late_holder, 2)


def _refusals(rank: int) -> dict[str, str]:
    messages = {}

    def refused(key: str, sch: Schedule, *args: object, **kwargs: object) -> None:
        state = [(name, id(p), tuple(p.shape)) for name, p in sch.root_module.named_parameters(remove_duplicate=False)]
        with pytest.raises(ScheduleError) as caught:
            sch.shard(*args, **kwargs)
        messages[key] = str(caught.value)
        assert state == [(name, id(p), tuple(p.shape)) for name, p in sch.root_module.named_parameters(remove_duplicate=False)]

    sch = _schedule(Tied())
    sch["wte"].shard("weight", axis=0)
    refused("other way", sch["head"], "weight", axis=1)
    refused("other blocks", sch["head"], "weight", axis=0, blocks=3)
    refused("twice", sch["wte"], "weight", axis=0)
    sch["head"].shard("weight", axis=0)
    refused("twice at the other place", sch["head"], "weight", axis=0)

    sch = _schedule(nn.Sequential(nn.Linear(4, 8)))
    sch["0"].shard(["weight", "bias"], axis=0)
    refused("both twice", sch["0"], ["weight", "bias"], axis=0)
    refused("another axis", sch["0"], "weight", axis=1)

    model = Tied()
    model.stranger = nn.Module()
    model.stranger.register_parameter("weight", model.wte.weight)
    refused("stranger", _schedule(model)["wte"], "weight", axis=0)
    return messages


def test_correctness_06_sharding_twice_or_differently_is_refused():
    messages = run_distributed(_refusals, 2)[0]
    assert messages["twice"] == "shard('wte'): 'weight' is already sharded, along 0; shard a parameter once"
    assert "already sharded, along 0" in messages["other way"]
    assert "tied to a parameter sharded with blocks (12,)" in messages["other blocks"]
    assert "already sharded" in messages["twice at the other place"]
    assert "already sharded" in messages["both twice"]
    assert "already sharded, along 0" in messages["another axis"]
    assert "'weight' of the tied 'stranger' is in a Module, which no sharding rule covers" in messages["stranger"]


class Head(nn.Module):
    """Holds the bias of the layer inside, as the heads of BERT and RoBERTa do."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.decoder, self.reads = nn.Linear(4, 12), reads
        self.bias = self.decoder.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x) + (self.bias.mean() if self.reads else 0)


def _kept_around(rank: int) -> str:
    torch.manual_seed(0)
    for reads in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), Head(reads))
        before = copy.deepcopy(model)
        sch = _schedule(model)
        decoder = sch["1.decoder"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        decoder.sync("fwd_post", "all_gather", axis=-1)
        assert model[1].bias is model[1].decoder.bias
        build(sch)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if not reads:
            assert_equivalent(before, model, x)
    with pytest.raises(BuildError) as caught:
        model(x)
    return str(caught.value)


def test_a_module_around_may_keep_what_a_layer_inside_shards_but_not_read_it() -> None:
    first, second = run_distributed(_kept_around, 2)
    assert first == second
    assert re.match("Head '1' uses '1.bias = 1.decoder.bias' in mean at .*, but this rank has only its part of it", first)


def _facts(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    weight = model[0].weight
    weight.requires_grad_(False)
    weight.mark = "kept"
    sch = _schedule(model)
    parameter_facts(weight).tags.add("tagged")
    model[0].bias.register_hook(lambda grad: grad * 3)
    sch["0"].sync("fwd_post", lambda module, args, output: output + 1)
    model[0].bias.grad = torch.arange(8.0)
    sch["0"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    new = model[0].weight
    assert new is not weight
    assert (new.requires_grad, new.mark, parameter_facts(new).tags, parameter_facts(new).names) == (
        False,
        "kept",
        {"tagged"},
        ("0.weight",),
    )
    assert len(model[0]._forward_hooks) == 1
    assert shard_spec(new).full_shape == (8, 4)
    assert torch.equal(model[0].bias.grad, torch.arange(8.0).chunk(2)[rank])
    model[0].bias.grad = None
    model(torch.zeros(1, 4)).sum().backward()
    assert model[0].bias.grad.tolist() == [3.0] * 4


def test_correctness_07_requires_grad_tags_and_hooks_survive():
    run_distributed(_facts, 2)


def _undone(rank: int) -> None:
    model = Tied(bias=True)
    state = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    attributes = [dict(module.__dict__) for module in (model.wte, model.head)]
    sch = _schedule(model)
    sch["wte"].shard("weight", axis=0)
    sch.undo()
    assert state == [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    assert attributes == [dict(module.__dict__) for module in (model.wte, model.head)]
    assert shard_spec(model.wte.weight) is None


def test_undo_puts_every_holder_of_a_tie_back():
    run_distributed(_undone, 2)


def _copied(rank: int) -> str:
    """A copy of the module keeps its shards, norms and reductions; a copy that could not is refused."""
    model = nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 4))
    before = copy.deepcopy(model)
    sch = _schedule(model)
    sch.tensor_parallel({"0": "colwise", "1": "replicated_with_grad_allreduce", "2": "rowwise"})
    build(sch)
    copied = copy.deepcopy(model)
    x = torch.ones(2, 4)
    for module in (before, model, copied):
        module(x).pow(2).sum().backward()
    norms = [clip_grad_norm_(module.parameters(), 0.1) for module in (before, model, copied)]
    torch.testing.assert_close(norms, norms[:1] * 3)
    full = _schedule(copied).full_state("grad")
    for name, parameter in before.named_parameters():
        torch.testing.assert_close(full[name], parameter.grad)
    assert parameter_facts(copied[0].weight) is not parameter_facts(model[0].weight)
    torch.save(copied.state_dict(), io.BytesIO())
    with pytest.raises(TypeError) as caught:
        torch.save(copied, io.BytesIO())
    return str(caught.value)


def test_facts_go_with_a_copy_of_the_module():
    message = "what is sharded cannot be pickled with its process group; save state_dict() or full_state()"
    assert run_distributed(_copied, 2) == [message] * 2


def _neighbours(rank: int) -> None:
    calls: list[str] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    sch = _schedule(model)
    model[1].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[1].register_forward_hook(lambda *_: calls.append("after"))
    model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    model.register_forward_hook(lambda *_: calls.append("whole"))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(f"{len(parameter.grad)} rows"))
    sch["0"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    model(torch.ones(2, 4)).sum().backward()
    assert calls == ["before", "after", "whole", "backward", "8 rows"]


def test_correctness_07_hooks_of_modules_around_a_shard_survive():
    run_distributed(_neighbours, 2)
