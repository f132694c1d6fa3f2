"""``nn.MultiheadAttention`` that is split by heads equals the unmodified module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import ScheduleError, build, create_schedule, set_random_seed
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc

WIDTH, HEADS = 16, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 12, "vdim": 8, "batch_first": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
}
CALLS = ("self", "cross", "padding", "mask of heads", "floating mask", "causal", "single", "one sequence")


class Attends(nn.Module):
    """An attention that is called in all common ways."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.bias = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor, other: torch.Tensor, value: torch.Tensor, call: str = "self") -> torch.Tensor:
        attention, same = self.attention, self.attention._qkv_same_embed_dim
        given = (x, x, x) if same and call != "cross" else (x, other, value)
        options: dict[str, Any] = {}
        blocked = torch.ones(5, 5, dtype=torch.bool).triu(1)
        if call == "padding":
            options = {"key_padding_mask": torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [4]])}
        elif call == "mask of heads":
            rows = torch.stack([blocked.roll(number, 1).fill_diagonal_(False) for number in range(3 * attention.num_heads)])
            options = {"attn_mask": rows, "average_attn_weights": False}
        elif call == "floating mask":
            options = {"attn_mask": self.bias}
        elif call == "causal":
            options = {"attn_mask": blocked, "is_causal": True, "need_weights": False}
        elif call == "single":
            options = {"need_weights": False}
        elif call == "one sequence":
            given = tuple(each[0] if attention.batch_first else each[:, 0] for each in given)
        output, weights = attention(*given, **options)
        return output if weights is None else output.sum() + (weights * torch.arange(weights.numel()).view_as(weights)).sum()


def inputs(options: dict[str, Any], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 5) if options.get("batch_first") else (5, 3)
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    return [torch.randn(*shape, width, generator=generator, requires_grad=True) for width in widths]


def pair(options: dict[str, Any]) -> tuple[Attends, Attends]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Attends(options))
    return made[0], made[1]


def check(options: dict[str, Any], model: nn.Module, expected: nn.Module, sch: Any, call: str) -> None:
    found, meant = inputs(options), inputs(options)
    for each, given in ((model, found), (expected, meant)):
        each.zero_grad()
        each(*given, call).square().sum().backward()
    torch.testing.assert_close(model(*found, call), expected(*meant, call), atol=1e-5, rtol=1e-4)
    gradients = sch.full_state("grad")
    wanted = {name: p.grad for name, p in expected.named_parameters()}
    wanted.update({f"input {n}": x.grad for n, x in enumerate(meant)})
    gradients = {**gradients, **{f"input {n}": x.grad for n, x in enumerate(found)}}
    for name, value in wanted.items():
        if value is not None:
            scale = float(value.abs().max()) + 1e-6
            torch.testing.assert_close(gradients[name] / scale, value / scale, atol=5e-5, rtol=1e-4, msg=f"{call}: {name}")


def all_ways(rank: int) -> None:
    for options in OPTIONS.values():
        expected, model = pair(options)
        sch = create_schedule(model, example_inputs=inputs(options))
        sch.tensor_parallel()
        build(sch)
        assert model.attention.out_proj.weight.shape[1] == WIDTH // sch.world_size
        for call in CALLS:
            if call == "padding" and options.get("batch_first"):
                continue  # both layouts are in the other calls
            check(options, model, expected, sch, call)
        for each in (model.eval(), expected.eval()):
            each.requires_grad_(False)
        given = [x.detach() for x in inputs(options)]
        torch.testing.assert_close(model(*given), expected(*given), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_split_however_it_is_made_and_called(ranks: int) -> None:
    run_distributed(all_ways, ranks, timeout=100)


def by_hand(rank: int) -> None:
    expected, model = pair({})
    sch = create_schedule(model)
    sch["attention"].shard("in_proj_weight", axis=0).sync("fwd_post", "all_reduce").sync("bwd_post", "all_reduce")
    build(sch)
    check({}, model, expected, sch, "cross")
    with pytest.raises(ScheduleError, match="cannot be split along 1"):
        create_schedule(Attends({}))["attention"].shard("in_proj_weight", axis=1)
    odd = nn.Sequential(nn.MultiheadAttention(12, 3))
    with pytest.raises(ScheduleError, match="num_heads of the MultiheadAttention is 3, not divisible by 2 ranks"):
        create_schedule(odd)["0"].shard("in_proj_weight", axis=0)


def dropped(rank: int) -> torch.Tensor:
    _, model = pair({"dropout": 0.5})
    sch = create_schedule(model, example_inputs=inputs({}))
    sch.tensor_parallel()
    build(sch)
    set_random_seed(3, tp_rank=rank)
    x = inputs({})[0]
    _, weights = model.attention(x, x, x, average_attn_weights=False)
    return (weights == 0).detach()


def test_by_hand_and_dropout() -> None:
    run_distributed(by_hand, 2)
    masks, others = run_distributed(dropped, 2)
    assert torch.equal(masks, others)
    assert not torch.equal(masks[:, :2], masks[:, 2:])
