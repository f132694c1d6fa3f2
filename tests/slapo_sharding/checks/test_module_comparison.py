"""Wrong results of a manual schedule that torch's rules miss are found by a rerun on whole values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import BuildError, build, create_schedule, set_random_seed
from slapo_sharding.checks import module_comparison
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc


class Pair(nn.Module):
    """Two layers with the code of the subclasses between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.heads, self.calls = nn.Linear(4, 8), nn.Linear(8, 4), 4, []
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


class Scaled(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[-1] ** -0.5


class Counted(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[-1])


class First(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * x[..., :1].sigmoid()


class OneByOne(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each / (1 + number) for number, each in enumerate(x.unbind(-1))], -1)


class Running(Pair):
    """A loop whose steps depend on each other."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        found = [x[..., 0]]
        for index in range(1, x.shape[-1]):
            found.append(found[-1] * 0.5 + x[..., index])
        return torch.stack(found, -1)


class Item(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max().item()


class Numpy(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.detach().numpy().std())


class Mapped(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: row - row.mean())(x)


class WithoutRule(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cdist(x, x).mean()


class HeadsOfAll(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        made = x.view(len(x), self.heads, x.shape[-1] // self.heads)
        return made.softmax(-1).flatten(1)


WRONG: tuple[type[Pair], ...] = (Scaled, Counted, First, OneByOne, Running, Item, Numpy, Mapped, WithoutRule, HeadsOfAll)


class ByHead(Pair):
    """The user sets the number of heads, as in the README."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), self.heads, 2).softmax(-1).flatten(1)


class Dropping(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Noting(Pair):
    """Changes a list and a buffer in each call."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        self.mean.mul_(0.5).add_(1)
        return x.tanh()


class Drawing(Pair):
    """Adds different noise on each rank in training, which cannot be compared."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x)


class FirstTwice(Pair):
    """Reads one element of a replicated value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * x[..., :1].item() if len(x) == 1 else self.down(self.up(x).relu()) + x[0, 0]


def local_heads(sch: Any) -> None:
    sch.mod.heads //= 2


RIGHT: tuple[tuple[type[Pair], Callable[[Any], Any]], ...] = (
    (Pair, lambda sch: None),
    (ByHead, local_heads),
    (Dropping, lambda sch: sch.fork_rng()),
    (Noting, lambda sch: None),
    (Drawing, lambda sch: sch.fork_rng()),
    (FirstTwice, lambda sch: None),
)


def by_hand(model: nn.Module, before: Callable[[Any], Any] = lambda sch: None) -> Any:
    sch = create_schedule(model)
    before(sch)
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return sch


def message_of(model: nn.Module, **options: Any) -> str:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    build(by_hand(model), **options)
    try:
        model(x)
    except BuildError as err:
        return str(err)
    return ""


def found(rank: int) -> dict[str, str]:
    return {kind.__name__: message_of(kind()) for kind in WRONG}


def test_results_that_depend_on_the_shard_are_an_error_on_all_ranks() -> None:
    first, second = run_distributed(found, 2)
    assert first == second
    named = re.compile(r"the model, \w+, at \S+test_module_comparison\.py:\d+: .*check=False turns")
    assert [kind for kind, text in first.items() if not named.match(text)] == []


def unchecked(rank: int) -> str:
    return message_of(Scaled(), check=False)


def test_the_check_can_be_turned_off() -> None:
    assert run_distributed(unchecked, 2) == ["", ""]


def right(rank: int) -> None:
    skipped: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_comparison, "_skip", lambda call, reason: skipped.append(type(call.module).__name__))
        for kind, before in RIGHT:
            runs(rank, kind, before)
    assert skipped == ["Drawing"]


def runs(rank: int, kind: type[Pair], before: Callable[[Any], Any]) -> None:
    """Run a model for the first time; the comparison must leave no trace."""
    set_random_seed(0, tp_rank=rank)
    expected, model = kind(), kind()
    build(by_hand(model, before))
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, output: seen.append(1))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    output = model(x)
    if kind not in (Dropping, Drawing):
        torch.testing.assert_close(output, expected(x))
    assert torch.equal(state, torch.get_rng_state())
    assert (len(model.calls), model.mean.tolist(), seen) == (kind is Noting, [float(kind is Noting)] * 4, [1])


def test_right_schedules_run_and_leave_no_trace_of_the_comparison() -> None:
    run_distributed(right, 2)
