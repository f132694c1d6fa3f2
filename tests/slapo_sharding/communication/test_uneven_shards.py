"""Sizes that the ranks do not divide: collectives of uneven shards, layers, vocabularies."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, ScheduleError, build, create_schedule, shard_spec
from slapo_sharding import plugin
from slapo_sharding.communication import collectives
from slapo_sharding.communication.cross_entropy import parallel_cross_entropy
from slapo_testing import run_distributed
from slapo_training.distributed import clip_grad_norm_
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


def _chunk(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's chunk of ``x``; torch omits empty chunks."""
    ranks, empty = dist.get_world_size(), x.narrow(dim, 0, 0)
    return [*x.chunk(ranks, dim), *[empty] * ranks][dist.get_rank()].clone()


def _joined_and_cut(rank: int, size: int) -> None:
    world = dist.group.WORLD
    for dim in (0, 1, -1):
        shape = [2, 3, 4]
        shape[dim] = size
        torch.manual_seed(0)
        whole, grad, ranks = torch.randn(shape), torch.randn(shape), dist.get_world_size()
        for backward, factor in (("split", 1), ("reduce_scatter", ranks)):
            x = _chunk(whole, dim).requires_grad_()
            y = collectives.all_gather(x, dim, world, size=size, backward=backward)
            assert torch.equal(y, whole)
            y.backward(grad)
            torch.testing.assert_close(x.grad, factor * _chunk(grad, dim))
        x = whole.clone().requires_grad_()
        y = collectives.scatter(x, dim, world, uneven=True)
        assert torch.equal(y, _chunk(whole, dim))
        y.backward(_chunk(grad, dim))
        assert torch.equal(x.grad, grad)


@pytest.mark.parametrize(("ranks", "size"), [(2, 5), (4, 7), (4, 5), (3, 1), (4, 8)])
def test_uneven_shards_are_joined_and_cut(ranks, size):
    run_distributed(_joined_and_cut, ranks, size)


def _refusals(rank: int) -> list[str]:
    messages = []
    for call in (
        lambda: collectives.all_gather(torch.zeros(1), 0, dist.group.WORLD, size=5),
        lambda: collectives.scatter(torch.zeros(5), 0, dist.group.WORLD),
        lambda: collectives.reduce_scatter(torch.zeros(5), 0, dist.group.WORLD),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_does_not_fit_is_refused():
    first, second = run_distributed(_refusals, 2)
    assert first[0] == "dim 0 of a shard of shape (1,) is not rank 0's part of 5"
    odd = "dim 0 of a tensor of shape (5,) is not divisible by 2 ranks; pad it (a sequence, say)"
    assert first[1:] == second[1:] == [odd] * 2


def _make_schedule(model: nn.Module, steps: Callable[[Schedule], object]) -> tuple[nn.Module, Schedule]:
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = copy.deepcopy(model)
    schedule = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    steps(schedule)
    build(schedule)
    return before, schedule


def _trains_alike(before: nn.Module, sch: Schedule, *args: Any) -> None:
    """Compare the gradient norm, and the weights after three steps."""
    norms = []
    for model, clip in ((before, nn.utils.clip_grad_norm_), (sch.mod, clip_grad_norm_)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for norm_type in (2.0, 1.0, math.inf):
            optimizer.zero_grad()
            model(*args).square().mean().backward()
            norms.append(float(clip(model.parameters(), 1.0, norm_type)))
            optimizer.step()
    assert norms[3:] == pytest.approx(norms[:3], rel=1e-5)
    trained = sch.full_state()
    for name, parameter in before.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach())


def _pairs(rank: int, size: int, blocks: int | None) -> list[int]:
    """A column and a row layer have the same ranges, also if ranks get nothing."""
    parts = []
    for first, second, column, row in (
        (nn.Linear(3, size), nn.Linear(size, 4), 0, 1),
        (Conv1D(size, 3), Conv1D(4, size), 1, 0),
    ):

        def steps(sch: Schedule, column: int = column, row: int = row) -> None:
            sch["0"].shard("weight", axis=column, blocks=blocks, uneven=True).sync("bwd_post", "all_reduce")
            sch["2"].shard("weight", axis=row, blocks=blocks, uneven=True).sync("fwd_post", "all_reduce")

        before, sch = _make_schedule(nn.Sequential(first, nn.Tanh(), second), steps)
        x = torch.randn(2, 5, 3, requires_grad=True)
        assert_equivalent(before, sch.mod, x)
        _trains_alike(before, sch, x.detach())
        own = sch.mod[0]
        parts.append(own.weight.shape[column])
        assert (len(own.bias), getattr(own, "out_features", None) or own.nf if parts[-1] else 0) == (parts[-1], parts[-1])
    return parts


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "size", "blocks", "parts"),
    [(2, 5, None, [3, 2]), (4, 10, None, [3, 3, 3, 1]), (4, 5, None, [2, 2, 1, 0]), (2, 10, 2, [6, 4]), (4, 8, None, [2] * 4)],
    ids=["2 ranks", "4 ranks", "nothing on one", "blocks", "they divide"],
)
def test_column_and_row_layers_fit_together(ranks, size, blocks, parts):
    assert run_distributed(_pairs, ranks, size, blocks) == [[part] * 2 for part in parts]


def _train_gathered(rank: int) -> None:
    def steps(sch: Schedule) -> None:
        sch["0"].shard("weight", axis=1, uneven=True).sync("fwd_post", "all_gather", axis=-1)
        sch["1"].shard("weight", axis=0, uneven=True, gathered=True)
        sch["1"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=2)
        sch["2"].shard("weight", axis=1, uneven=True).sync("fwd_pre", "scatter", axis=-1).sync("fwd_post", "all_reduce")

    before, sch = _make_schedule(nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 7), nn.Linear(7, 3)), steps)
    ids = torch.tensor([[0, 1, 5, 3]])
    assert_equivalent(before, sch.mod, ids)
    _trains_alike(before, sch, ids)


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_are_gathered_and_inputs_scattered(ranks):
    run_distributed(_train_gathered, ranks)


class Tied(nn.Module):
    """An embedding and a head with one weight of 11 rows."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 4, padding_idx=9)
        self.head = nn.Linear(4, 11, bias=bias)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.wte(ids)))


def _tied(rank: int) -> None:
    ids = torch.arange(11).repeat(2, 1)
    for order in permutations(("wte", "head")):
        for left_out in (None, *order):

            def steps(sch: Schedule, order: tuple[str, ...] = order, left_out: str | None = left_out) -> None:
                for name in order:
                    if name != left_out:
                        sch[name].shard("weight", axis=0, uneven=True)
                sch["wte"].sync("fwd_post", "all_reduce")
                sch["head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)

            before, sch = _make_schedule(Tied(), steps)
            assert sch.mod.wte.weight is sch.mod.head.weight
            assert_equivalent(before, sch.mod, ids)
            _trains_alike(before, sch, ids)


@pytest.mark.parametrize("ranks", [2, 4])
def test_correctness_10_a_tied_vocabulary_that_does_not_divide(ranks):
    run_distributed(_tied, ranks)


def _loss(rank: int) -> None:
    """The loss of logits that stay sharded."""

    def steps(sch: Schedule) -> None:
        sch["wte"].shard("weight", axis=0, uneven=True).sync("fwd_post", "all_reduce")
        sch["head"].shard("weight", axis=0).sync("bwd_post", "all_reduce")

    before, sch = _make_schedule(Tied(bias=False), steps)
    ids = torch.arange(11).repeat(2, 1)
    target = ids.flip(1).masked_fill(ids == 3, -100)
    expected = F.cross_entropy(before(ids).flatten(0, 1), target.flatten(), label_smoothing=0.1)
    loss = parallel_cross_entropy(sch.mod(ids), target, dist.group.WORLD, vocab_size=11, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(sch.full_state("grad")["wte.weight"], before.wte.weight.grad)
    with pytest.raises(ValueError, match="the ranks have from 2 to 3 columns; give vocab_size="):
        parallel_cross_entropy(sch.mod(ids), target, dist.group.WORLD)


def test_the_loss_of_logits_that_do_not_divide():
    run_distributed(_loss, 4)


def _gpt2(rank: int, vocabulary: int) -> tuple[int, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 4, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=vocabulary, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    before, sch = (
        copy.deepcopy(model),
        create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])),
    )
    sch.tensor_parallel()
    build(sch)
    ids = torch.tensor([[0, vocabulary // 2, vocabulary // 2 + 1, vocabulary - 1]])
    assert_equivalent(before, model, input_ids=ids, labels=ids, use_cache=False, loss=lambda output: output.loss)
    return len(model.lm_head.weight), len(sch.full_state()["lm_head.weight"])


def test_the_vocabulary_of_gpt2_is_split():
    assert run_distributed(_gpt2, 2, 50257) == [(25129, 50257), (25128, 50257)]


def _from_meta(rank: int) -> torch.Tensor:
    from slapo_core import init_empty_weights

    with init_empty_weights():
        model = Tied()
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["wte"].shard("weight", axis=0, uneven=True).sync("fwd_post", "all_reduce")
    sch["head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
    build(sch, seed=3)
    assert not copy.deepcopy(sch.mod).head.weight.is_meta
    return torch.cat([value.flatten() for value in sch.full_state().values()])


def test_late_weights_are_the_same_in_every_layout():
    (whole,), *others = run_distributed(_from_meta, 1), *run_distributed(_from_meta, 2), *run_distributed(_from_meta, 4)
    assert all(torch.equal(other, whole) for other in others)


def _bad(rank: int) -> dict[str, str]:
    def message(model: nn.Module, *args: Any, **kwargs: Any) -> str:
        sch = create_schedule(nn.Sequential(model), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
        with pytest.raises(ScheduleError) as caught:
            sch["0"].shard(*args, **kwargs)
        return str(caught.value)

    found = {
        "default": message(nn.Linear(4, 7), "weight", axis=0),
        "bias": message(nn.Linear(4, 7), ["weight", "bias"], axis=0, uneven=False),
        "rows": message(nn.Embedding(5, 4), "weight", axis=0, uneven=True),
        "convolution": message(nn.Conv1d(4, 7, 1), "weight", axis=0, uneven=True),
    }
    sch = create_schedule(
        nn.Sequential(nn.Linear(4, 7)), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])
    )
    sch["0"].shard("weight", axis=0, uneven=True).sync("bwd_post", "all_reduce")
    sch["0"].sync("fwd_post", "reduce_scatter", axis=-1)
    with pytest.raises(BuildError) as caught:
        build(sch)
    assert shard_spec(sch.mod[0].weight).sizes == (2, 2, 2, 1)
    return {**found, "reduced": str(caught.value)}


def _misplaced(rank: int) -> list[str]:
    messages = []
    for place, sync, options in (
        ("0", {"sync_op_or_fn": "all_gather", "axis": -1}, {"uneven": True}),
        ("0.0", {"sync_op_or_fn": "RS->SR"}, {"uneven": True}),
        ("0.0", {"sync_op_or_fn": "all_gather", "axis": -1}, {"blocks": 2, "uneven": True}),
    ):
        sch = create_schedule(
            nn.Sequential(nn.Sequential(nn.Linear(4, 6))),
            plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
        )
        sch["0.0"].shard("weight", axis=0, **options).sync("bwd_post", "all_reduce")
        sch[place].sync("fwd_post", **sync)
        with pytest.raises(BuildError) as caught:
            build(sch)
        messages.append(str(caught.value))
    return messages


def test_bad_input_what_would_be_put_together_wrongly_is_refused():
    around, exchanged, mixed = run_distributed(_misplaced, 4)[0]
    assert "'0': the output of '0.0' is not in equal parts; gather it at '0.0' itself" in around
    assert "'0.0': its output is not in equal parts, which all_to_all needs; all_gather it" in exchanged
    assert "made of blocks, each split for itself, which all_gather would mix; shard it with gathered=True" in mixed


def _blocks_gathered(rank: int) -> None:
    def steps(sch: Schedule) -> None:
        sch["0"].shard("weight", axis=0, blocks=2, gathered=True, uneven=True)
        sch["0"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)

    before, sch = _make_schedule(nn.Sequential(nn.Linear(4, 6)), steps)
    assert_equivalent(before, sch.mod, torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_blocks_stay_in_order(ranks):
    run_distributed(_blocks_gathered, ranks)


def test_bad_input_what_does_not_divide_is_refused():
    messages = run_distributed(_bad, 4)[0]
    assert messages["default"] == messages["bias"]
    assert messages["default"].endswith(
        "dim 0 of 'weight' has size 7, not divisible by 4 ranks; pad it, give uneven=True or use another axis"
    )
    assert messages["rows"].endswith("has size 5, of which the last of 4 ranks would get nothing; use fewer ranks")
    assert messages["convolution"].endswith("not divisible by 4 ranks; pad it or use another axis")
    assert "its output is sharded, reduce_scatter would add different parts; gather it" in messages["reduced"]
