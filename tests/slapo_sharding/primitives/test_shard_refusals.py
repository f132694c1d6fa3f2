"""Illegal shard steps change nothing, and schedules with wrong syncs are not built."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_tracing.nodes import wrap_forward

pytestmark = pytest.mark.multiproc


def _schedule(module: nn.Module) -> Schedule:
    return create_schedule(module, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(-1)


def _wrap(module: nn.Module) -> nn.Module:
    wrap_forward(module, lambda call, *args: call(*args))
    return module


def _hooked(module: nn.Module, register: str) -> nn.Module:
    getattr(module, register)(lambda *args: None)
    return module


def _own_forward(module: nn.Module) -> nn.Module:
    module.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight) * 2, module)
    return module


SHARDS = {
    "name": (lambda: nn.Linear(4, 8), ("wait", 0), "shard('0'): no parameter 'wait'; available: weight, bias"),
    "no bias": (lambda: nn.Linear(4, 8, bias=False), ("bias", 0), "no parameter 'bias'; available: weight"),
    "no names": (lambda: nn.Linear(4, 8), ([], 0), "no parameter is named"),
    "a number": (lambda: nn.Linear(4, 8), (3, 0), "shard('0'): 3 is not the name of a parameter; give one, e.g. 'weight'"),
    "a name and a number": (lambda: nn.Linear(4, 8), (["weight", 3], 0), "3 is not the name of a parameter"),
    "true axis": (lambda: nn.Linear(4, 8), ("weight", True), "axis True is out of range for 'weight' with 2 dimensions"),
    "true blocks": (lambda: nn.Linear(4, 8), ("weight", 0, True), "shard('0'): blocks is True; give how many equal ones"),
    "half blocks": (lambda: nn.Linear(4, 8), ("weight", 0, 2.0), "blocks is 2.0; give how many equal ones, or their sizes"),
    "blocks in words": (lambda: nn.Linear(4, 8), ("weight", 0, "44"), "blocks is '44'; give how many equal ones"),
    "a true block": (lambda: nn.Linear(4, 8), ("weight", 0, [True, 7]), "blocks (True, 7) do not add up to the size 8"),
    "axis": (lambda: nn.Linear(4, 8), ("weight", 2), "axis 2 is out of range for 'weight' with 2 dimensions"),
    "size": (lambda: nn.Linear(4, 7), ("weight", 0), "dim 0 of 'weight' has size 7, not divisible by 2 ranks; pad it"),
    "vocabulary": (lambda: nn.Embedding(11, 4), ("weight", 0), "dim 0 of 'weight' has size 11, not divisible by 2 ranks"),
    "row bias": (lambda: nn.Linear(4, 8), (["weight", "bias"], 1), "'bias' stays whole when 'weight' is split along 1"),
    "class": (lambda: nn.Bilinear(4, 4, 8), ("weight", 0), "'weight' is in a Bilinear, which no sharding rule covers"),
    "own forward": (lambda: OwnForward(4, 8), ("weight", 0), "'weight' is in a OwnForward, which no sharding rule covers"),
    "max_norm": (lambda: nn.Embedding(8, 4, max_norm=1.0), ("weight", 0), "max_norm=1.0 rescales whole rows"),
    "sparse": (lambda: nn.Embedding(8, 4, sparse=True), ("weight", 1), "sparse gradients cannot be sharded"),
    "frequency": (lambda: nn.Embedding(8, 4, scale_grad_by_freq=True), ("weight", 0), "scale_grad_by_freq counts indices"),
    "blocks": (lambda: nn.Embedding(8, 4), ("weight", 0, 2), "'weight' cannot be split along 0 in blocks"),
    "wrapped": (lambda: _wrap(nn.Linear(4, 8)), ("weight", 1), "forward is wrapped already; shard it before"),
    "hook": (lambda: _hooked(nn.Linear(4, 8), "register_forward_hook"), ("weight", 1), "it has a forward hook of its own"),
    "pre-hook": (lambda: _hooked(nn.Linear(4, 8), "register_forward_pre_hook"), ("weight", 1), "a forward pre-hook of its own"),
    "backward": (lambda: _hooked(nn.Linear(4, 8), "register_full_backward_hook"), ("weight", 0), "a backward hook of its own"),
    "instance": (lambda: _own_forward(nn.Linear(4, 8)), ("weight", 0), "it has a forward of its own that would see a part"),
    "wrapped instance": (lambda: _wrap(_own_forward(nn.Linear(4, 8))), ("weight", 0), "it has a forward of its own"),
}


def _shard(rank: int) -> dict[str, str]:
    messages = {}
    for key, (make, arguments, _) in SHARDS.items():
        sch = _schedule(nn.Sequential(make()))
        state = (list(map(id, sch.mod.parameters())), dict(sch["0"].mod.__dict__))
        with pytest.raises(ScheduleError) as caught:
            sch["0"].shard(*arguments)
        messages[key] = str(caught.value)
        assert state == (list(map(id, sch.mod.parameters())), dict(sch["0"].mod.__dict__)), key
        assert not sch.journal
    return messages


def test_an_illegal_shard_says_why_and_changes_nothing():
    messages = run_distributed(_shard, 2)[0]
    assert {key: message for key, message in messages.items() if SHARDS[key][2] not in message} == {}


def test_a_module_without_bias_does_not_offer_one() -> None:
    sch = create_schedule(nn.Linear(4, 8, bias=False), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    with pytest.raises(ScheduleError, match=r"no parameter 'bias'; available: weight$"):
        sch.shard(["weight", "bias"], axis=0)


def test_processes_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    sch = create_schedule(nn.Linear(4, 8), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    with pytest.raises(ScheduleError, match=r"one of 2 processes, WORLD_SIZE says.*init_process_group\(\) before create_sch"):
        sch.shard("weight", axis=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)


def _column(sch: Schedule) -> Schedule:
    return sch["up"].shard("weight", axis=0)


def _row(sch: Schedule) -> Schedule:
    return sch["down"].shard("weight", axis=1)


def _replaced_head(sch: Schedule) -> None:
    sch["emb"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    late = nn.Linear(4, 8, bias=False)
    late.weight = sch["emb"].mod.weight
    sch.root_module.late = late


def _replaced_after(sch: Schedule) -> None:
    sch["emb"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    sch["emb"].replace(nn.Embedding(8, 4))


BUILDS: dict[str, tuple[Callable[[Schedule], object], str]] = {
    "column": (_column, "'up': the gradient of its input is partial; needs sync('bwd_post', 'all_reduce')"),
    "row": (_row, "'down': its output is partial; needs sync('fwd_post', 'all_reduce')"),
    "row by parent": (
        lambda sch: (_row(sch), sch.sync("fwd_post", "all_reduce")),
        "'down': its output is partial; needs sync('fwd_post', 'all_reduce')",  # its bias would be left out
    ),
    "embedding": (lambda sch: sch["emb"].shard("weight", axis=0), "'emb': its output is partial; needs"),
    "row twice": (
        lambda sch: _row(sch).sync("fwd_post", "all_reduce").sync("fwd_post", "all_reduce"),
        "'down': its output is reduced 2 times; sync it once",
    ),
    "column twice": (
        lambda sch: (_column(sch).sync("bwd_post", "all_reduce"), sch.sync("bwd_post", "all_reduce")),
        "'up': the gradient of its input is reduced 2 times; sync it once",
    ),
    "gather and reduce": (
        lambda sch: _column(sch).sync("bwd_post", "all_reduce").sync("fwd_pre", "all_gather", axis=1),
        "'up': the gradient of its input is reduced 2 times",
    ),
    "reduced columns": (
        lambda sch: _column(sch).sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce"),
        "'up': its output is sharded, all_reduce would add different parts; gather it",
    ),
    "not gathered": (
        lambda sch: sch["up"].shard("weight", axis=0, gathered=True).sync("bwd_post", "all_reduce"),
        "'up': sharded with gathered=True; needs sync('fwd_post', 'all_gather', axis=-1)",
    ),
    "nothing sharded": (
        lambda sch: sch["up"].sync("fwd_post", "all_reduce"),
        "'up': sync('fwd_post', 'all_reduce') adds up what is the same on every rank, as nothing in it is sharded",
    ),
    "gradient of nothing sharded": (
        lambda sch: sch["up"].sync("bwd_post", "all_reduce"),
        "'up': sync('bwd_post', 'all_reduce') adds up what is the same on every rank",
    ),
    "gathered and summed for nothing": (
        lambda sch: (
            sch["up"].sync("fwd_post", "scatter", axis=-1),
            sch["down"].sync("fwd_pre", "all_gather", axis=-1),
        ),
        "'down': sync('fwd_pre', 'all_gather') adds up gradients that are the same on every rank, as nothing in it is "
        "sharded and takes the whole of its input; give it backward='split', or leave it out; check=False",
    ),
    "scheme for nothing": (
        lambda sch: (_column(sch).sync("bwd_post", "all_reduce"), sch["down"].sync("fwd_pre", "RS->RR")),
        "step 3, sch['down'].sync('fwd_pre', 'RS->RR'): 'down': sync('fwd_pre', 'all_gather') adds up gradients",
    ),
    "gradient of parts": (
        lambda sch: _row(sch).sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce"),
        "'down': sync('bwd_post', 'all_reduce') adds up gradients that are the same on every rank, as nothing in it is "
        "sharded and takes the whole of its input; leave it out",
    ),
    "gathered around a scattered layer": (
        lambda sch: (
            sch.sync("fwd_pre", "all_gather", axis=-1),
            _row(sch).sync("fwd_pre", "scatter", axis=-1).sync("fwd_post", "all_reduce"),
        ),
        "the model: sync('fwd_pre', 'all_gather') adds up gradients that are the same on every rank",
    ),
    "gathered twice": (
        lambda sch: (_column(sch).sync("bwd_post", "all_reduce"), *(sch["up"].sync("fwd_post", "RS->RR") for _ in range(2))),
        "'up': its output is whole after all_gather, and sync('fwd_post', 'all_gather') needs it sharded; sync it once",
    ),
    "gathered twice before": (
        lambda sch: [sch["up"].sync("fwd_pre", "all_gather", axis=axis, backward="split") for axis in (0, -1)],
        "'up': its input is whole after all_gather, and sync('fwd_pre', 'all_gather') needs it sharded; sync it once",
    ),
    "scattered twice": (
        lambda sch: (_row(sch).sync("fwd_post", "all_reduce"), *(sch["down"].sync("fwd_pre", "RR->RS") for _ in range(2))),
        "'down': its input is sharded after scatter, and sync('fwd_pre', 'scatter') needs it whole; sync it once",
    ),
    "scattered after reduce_scatter": (
        lambda sch: _row(sch).sync("fwd_post", "reduce_scatter", axis=1).sync("fwd_post", "scatter", axis=1),
        "'down': its output is sharded after reduce_scatter, and sync('fwd_post', 'scatter') needs it whole; leave one of",
    ),
    "scattered columns": (
        lambda sch: _column(sch).sync("bwd_post", "all_reduce").sync("fwd_post", "scatter", axis=1),
        "'up': its output is sharded, and sync('fwd_post', 'scatter') needs it whole; leave it out, or make it so",
    ),
    "gathered before it is reduced": (
        lambda sch: sch["emb"].shard("weight", axis=0).sync("fwd_post", "all_gather", axis=1).sync("fwd_post", "all_reduce"),
        "'emb': its output is partial, and sync('fwd_post', 'all_gather') needs it sharded",
    ),
    "exchanged when whole": (
        lambda sch: sch["up"].sync("fwd_post", "SR->RR").sync("fwd_post", "RS->SR"),
        "'up': its output is whole after all_gather, and sync('fwd_post', 'all_to_all') needs it sharded; leave one of",
    ),
    "columns of a part": (
        lambda sch: _column(sch).sync("bwd_post", "all_reduce").sync("fwd_pre", "scatter", axis=1),
        "'up': its input is sharded after its syncs, and it takes one that is whole; leave them out",
    ),
    "rows of the whole": (
        lambda sch: _row(sch).sync("fwd_pre", "all_gather", axis=1, backward="split").sync("fwd_post", "all_reduce"),
        "'down': its input is whole after its syncs, and it takes one that is sharded; leave them out",
    ),
    "replaced after": (_replaced_after, "'emb': sync('fwd_post', 'all_reduce') adds up what is the same on every rank"),
    "hook": (
        lambda sch: _hooked(_column(sch).sync("bwd_post", "all_reduce").mod, "register_forward_hook"),
        "'up' has a forward hook of its own that would see a part only; put it on a module around, or give it to sync",
    ),
    "pre-hook": (
        lambda sch: _hooked(_row(sch).sync("fwd_post", "all_reduce").mod, "register_forward_pre_hook"),
        "'down' has a forward pre-hook of its own",
    ),
    "backward hook": (
        lambda sch: _hooked(_row(sch).sync("fwd_post", "all_reduce").mod, "register_full_backward_hook"),
        "'down' has a backward hook of its own",
    ),
    "forward": (
        lambda sch: _own_forward(_row(sch).sync("fwd_post", "all_reduce").mod),
        "'down' has a forward of its own",
    ),
    "unaware": (_replaced_head, "'late' holds 'weight' that is sharded elsewhere; shard it here in the same way"),
}


def _build(rank: int) -> dict[str, str]:
    messages = {}
    for key, (steps, _) in BUILDS.items():
        sch = _schedule(Net())
        steps(sch)
        with pytest.raises(BuildError) as caught:
            build(sch)
        messages[key] = str(caught.value)
        build(sch, check=False)
    return messages


def test_a_missing_doubled_or_impossible_sync_is_refused_at_build():
    messages = run_distributed(_build, 2)[0]
    assert {key: message for key, message in messages.items() if BUILDS[key][1] not in message} == {}


def _accepted(rank: int) -> None:
    for steps in (
        lambda sch: (_column(sch), sch.sync("bwd_post", "all_reduce")),
        lambda sch: _column(sch).sync("fwd_pre", "all_gather", axis=1),
        lambda sch: _row(sch).sync("fwd_post", "reduce_scatter", axis=1),
        lambda sch: _row(sch).sync("fwd_post", lambda module, args, output: output),
        lambda sch: (sch["emb"].shard("weight", axis=0), sch.sync("fwd_post", "all_reduce")),
        lambda sch: sch["emb"].shard("weight", axis=1),
        lambda sch: (sch["down"].sync("fwd_post", "all_reduce"), _row(sch)),
        lambda sch: (_wrap(sch["up"].mod), _column(sch).sync("bwd_post", "all_reduce")),
        lambda sch: sch["up"].sync("fwd_post", "scatter", axis=1).sync("fwd_post", "all_gather", axis=1),
        lambda sch: sch["up"].sync("fwd_pre", "all_gather", axis=1, backward="split"),
        lambda sch: sch["up"].sync("fwd_pre", "RS->SR").sync("fwd_pre", "SR->RR", backward="split"),
        lambda sch: sch["up"].sync("fwd_pre", "all_gather", axis=1).sync("fwd_pre", lambda module, args: None),
        lambda sch: (sch.sync("fwd_pre", "all_gather", axis=1), _row(sch).sync("fwd_post", "all_reduce")),  # its code may cut
    ):
        sch = _schedule(Net())
        steps(sch)
        build(sch)


def test_syncs_of_the_module_or_one_around_it_are_enough():
    run_distributed(_accepted, 2)


def _split_by_plan(sch: Schedule) -> None:
    sch.tensor_parallel({"up": "colwise", "down": "rowwise"})
    _hooked(sch["up"].mod, "register_forward_hook")


class Heads(nn.Module):
    """A model that is one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Schedule], object], str]] = {
    "the last step of the module": (
        Net,
        lambda sch: (_column(sch).sync("bwd_post", "all_reduce"), _row(sch), sch["emb"].shard("weight", axis=1)),
        "step 3, sch['down'].shard('weight', axis=1): 'down': its output is partial; needs",
    ),
    "a step of a plan": (Net, _split_by_plan, "step 1, sch.tensor_parallel({'up': 'colwise', 'down': 'rowwise'}): 'up' has a"),
    "inside the whole model": (
        Heads,
        lambda sch: sch["q_proj"].shard("weight", axis=0).sync("bwd_post", "all_reduce"),
        "step 2, sch['q_proj'].sync('bwd_post', 'all_reduce'): the model: q_proj make local heads, k_proj all of them",
    ),
    "no step": (Net, lambda sch: _hand_over(sch["up"].mod), "'up' holds 'weight' that is sharded elsewhere"),
}


def _hand_over(module: nn.Module) -> None:
    """Replace the module by one of another model's."""
    other = _schedule(Net())
    _column(other)
    module.weight = other["up"].mod.weight


def _build_steps(rank: int) -> dict[str, str]:
    messages = {}
    for key, (make, steps, _) in STEPS.items():
        sch = _schedule(make())
        steps(sch)
        with pytest.raises(BuildError) as caught:
            build(sch)
        messages[key] = str(caught.value)
    return messages


def test_a_refusal_at_build_names_the_step():
    messages = run_distributed(_build_steps, 2)[0]
    assert {key: message for key, message in messages.items() if not message.startswith(STEPS[key][2])} == {}
