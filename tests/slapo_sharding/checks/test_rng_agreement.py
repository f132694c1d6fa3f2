"""Random draws for shards must differ between ranks; the first run checks it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule, set_random_seed
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])
X = torch.ones(4, 8)


class Between(nn.Module):
    """A dropout of a sharded value, then one of a replicated value."""

    def __init__(self, drop: Callable[[torch.Tensor, float, bool], torch.Tensor] | None, rate: float = 0.5) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.rate = nn.Linear(8, 16), nn.Linear(16, 8), drop, rate
        self.inside, self.residual = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden = self.inside(hidden) if self.drop is None else self.drop(hidden, self.rate, self.training)
        return self.residual(self.down(hidden))


def _attend(x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    heads = x.unflatten(-1, (-1, 4)).transpose(0, 1)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=rate * training).transpose(0, 1).flatten(1)


def _noise(x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    return x + torch.randn_like(x) if rate * training else x


DROPS: dict[str, Callable[[torch.Tensor, float, bool], torch.Tensor] | None] = {
    "a module": None,
    "dropout": F.dropout,
    "alpha_dropout": F.alpha_dropout,
    "in place": lambda x, rate, training: F.dropout(x, rate, training, inplace=True),
    "scaled_dot_product_attention": _attend,
    "randn_like": _noise,
}


def _built(drop: str, rate: float = 0.5, fork: str | None = None, **config: bool) -> nn.Module:
    model = Between(DROPS[drop], rate)
    sch = create_schedule(model, plugins=PLUGINS)
    sch["up"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if fork is not None:
        (sch[fork] if fork else sch).fork_rng()
    if fork == "":
        sch["residual"].fork_rng(outside=True)
    return build(sch, **config).module


def _same(rank: int) -> list[str]:
    set_random_seed(3, tp_rank=rank)
    messages = []
    for drop in DROPS:
        with pytest.raises(BuildError) as caught:
            _built(drop)(X)
        messages.append(str(caught.value))
    return messages


def test_the_same_numbers_on_every_rank_are_refused() -> None:
    first, second = run_distributed(_same, 2)
    assert first == second
    for name, message in zip(DROPS, first, strict=True):
        func = {"a module": "dropout", "in place": "dropout"}.get(name, name)
        where = "Dropout 'inside'" if name == "a module" else "the model, Between,"
        assert message.startswith(f"{where} at {__file__}:")
        assert (
            f": {func} draws the same random numbers on every rank, and each rank has a part of the output of 'up'" in message
        )
        assert "call fork_rng() of this module or of one around it; check=False turns this check off" in message


def _different(rank: int) -> None:
    set_random_seed(3, tp_rank=rank)
    for drop in DROPS:
        _built(drop, fork="")(X).sum().backward()
        _built(drop, rate=0.0)(X)
        _built(drop, check=False)(X)
        _built(drop).eval()(X)
    _built("a module", fork="inside")(X)
    with pytest.raises(BuildError, match="the same random numbers"):
        _built("dropout", fork="inside")(X)
    model = _built("dropout")
    set_random_seed(3, tp_rank=rank, always_enable_tp_seed=True)
    with pytest.raises(BuildError, match=r"Dropout 'residual' .* draws different random numbers on each rank"):
        model(X)
    model.residual.p = 0.0
    model(X)


def test_forks_and_code_without_draws_run() -> None:
    run_distributed(_different, 2)


def _apart(rank: int) -> list[str]:
    """Different seeds on the ranks drop different elements of a replicated value."""
    messages = []
    for seeds in (lambda: torch.manual_seed(rank), lambda: set_random_seed(3, tp_rank=rank, always_enable_tp_seed=True)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 8))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        sch = create_schedule(model, plugins=PLUGINS)
        sch["2"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        build(sch)
        seeds()
        with pytest.raises(BuildError) as caught:
            model(torch.ones(3, 4))
        messages.append(str(caught.value))
        model.eval()(torch.ones(3, 4))
        torch.manual_seed(3)
        model.train()(torch.ones(3, 4))
    return messages


def test_different_dropout_of_a_replicated_value_is_refused() -> None:
    first, second = run_distributed(_apart, 2)
    assert first == second
    for message in first:
        assert "Dropout '1' at" in message
        assert (
            "dropout draws different random numbers on each rank, and all have the same value; seed the ranks alike" in message
        )
