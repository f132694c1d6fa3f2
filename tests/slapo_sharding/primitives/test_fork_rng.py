"""Dropout masks differ between ranks in a sharded region and are equal in a replicated one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, create_schedule, rng_state, set_random_seed, set_rng_state
from slapo_sharding import plugin
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc


class Region(nn.Module):
    """A dropout of sharded values, followed by one of replicated values."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.residual = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inside(x), self.residual(x)


def _masks(rank: int) -> list[list[float]]:
    sch = create_schedule(
        nn.Sequential(nn.Dropout(0.5), Region()), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])
    )
    sch["1"].fork_rng()
    sch["1.residual"].fork_rng(outside=True)
    set_random_seed(3, tp_rank=rank)
    x = torch.ones(32)
    masks = [sch["0"].mod(x), *sch["1"].mod(x), *sch["1"].mod(x), sch["0"].mod(x)]
    return [mask.tolist() for mask in masks]


def test_correctness_12_masks_differ_inside_a_sharded_region_and_agree_outside():
    one, other = run_distributed(_masks, 2)
    assert [left == right for left, right in zip(one, other, strict=True)] == [True, False, True, False, True, True]
    assert len({str(mask) for mask in one}) == 6


def _recomputed(rank: int) -> None:
    """A recomputation inside a fork draws the same masks and restores the states after the forward."""
    sch = create_schedule(nn.Sequential(Region()), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["0"].fork_rng()
    sch["0.residual"].fork_rng(outside=True)
    set_random_seed(3, tp_rank=rank)
    x, saved, drawn = torch.ones(32, requires_grad=True), rng_state(), []

    def region(x: torch.Tensor) -> torch.Tensor:
        now = rng_state()
        if drawn:
            set_rng_state(saved)
        outputs = sch.mod(x)
        drawn.append(outputs)
        if len(drawn) == 2:
            set_rng_state(now)
        return outputs[0] * outputs[1]

    checkpoint(region, x, use_reentrant=False, preserve_rng_state=False, early_stop=False).sum().backward()
    assert len(drawn) == 2
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    after = sch.mod(torch.ones(32))
    assert not torch.equal(after[0], drawn[0][0])
    assert not torch.equal(after[1], drawn[0][1])


def test_correctness_12_recompute_draws_the_same_masks():
    run_distributed(_recomputed, 2)


def _gpt2(rank: int) -> dict[str, list[float]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])).tensor_parallel()
    set_random_seed(3, tp_rank=rank)
    seen: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if name.endswith(("resid_dropout", "mlp.dropout", "drop")):
            module.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, out.flatten().tolist()))
    ids = torch.randint(32, (2, 8))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    other = [torch.zeros_like(loss) for _ in range(2)]
    dist.all_gather(other, loss.detach())
    assert torch.equal(*other)
    return seen


def test_correctness_12_replicated_values_of_gpt2_agree_with_dropout_on():
    one, other = run_distributed(_gpt2, 2)
    assert len(one) == 5
    assert one == other


def test_without_a_seed_training_is_refused_and_evaluation_runs():
    run_distributed(_without_seed, 1)


def _without_seed(rank: int) -> None:
    from slapo_core.distributed import random

    random._SEED_SET = False
    random.get_cuda_rng_tracker().reset()
    sch = create_schedule(
        nn.Sequential(nn.Dropout(0.5)), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])
    )
    sch["0"].fork_rng()
    before = torch.get_rng_state()
    with pytest.raises(ScheduleError, match=r"^fork_rng: there is no state yet .*; call set_random_seed"):
        sch.mod(torch.ones(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sch.mod.eval()(torch.ones(4)), torch.ones(4))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_a_recomputation_with_new_draws_is_refused(use_reentrant: bool, rate: float):
    """Transformers' ``gradient_checkpointing_enable()`` recomputes so; without dropout nothing is drawn."""
    sch = create_schedule(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)),
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
    )
    sch["1"].fork_rng()
    set_random_seed(3, tp_rank=0)
    for _ in range(2):
        output = checkpoint(sch.mod, torch.ones(8, 4, requires_grad=True), use_reentrant=use_reentrant).sin().sum()
        if rate:
            with pytest.raises(
                ScheduleError, match="draws different random numbers than the forward did; recompute with checkpoint"
            ):
                output.backward()
        else:
            output.backward()
