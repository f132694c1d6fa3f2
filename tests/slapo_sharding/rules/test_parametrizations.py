"""Layers with computed weights are split if shards follow from shards, and stay replicated otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from slapo_core import Schedule, build, create_schedule, shard_spec
from slapo_sharding.rules.layers import LINEAR
from slapo_sharding.rules.parametrizations import restricted_rule
from slapo_testing import run_distributed
from tests.slapo_torch.layouts import message_of


class Mixed(nn.Module):
    """Adds the neighbour of each row."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.1 * weight.flip(0)


class Bounded(nn.Module):
    """An elementwise function."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tanh() * 0.5


class Straight(torch.autograd.Function):
    """Rounds with a gradient scaled by the largest weight: shards of the value follow, those of the gradient do not."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.mul(8).round().div(8)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] / grads[0].abs().max()


class Rounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Straight.apply(weight)  # type: ignore[no-untyped-call]
        return found


class Factors(nn.Module):
    """A product of two thin matrices."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        return left[:, :4] * values[:4], right[:4]


class Limited(nn.Module):
    """Bounds the norm of the weight, far above that of random numbers."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * (100 / weight.norm()).clamp(max=1)


class Watching(nn.Module):
    """Returns the weight unchanged, and keeps its largest element in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.largest = weight.detach().abs().max()
        return weight


class Grouped(nn.Module):
    """Divides each group of eight elements by its largest."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        groups = weight.reshape(-1, 8)
        return (groups / groups.abs().amax(1, keepdim=True)).reshape(weight.shape)


class Scaled(nn.Module):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


def registered(make: Callable[[], nn.Module], name: str = "weight") -> Callable[[nn.Module], object]:
    return lambda layer: parametrize.register_parametrization(layer, name, make())


KINDS: dict[str, Callable[[nn.Module], object]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "mixed": registered(Mixed),
    "mixed bias": registered(Mixed, "bias"),
    "elementwise": registered(Bounded),
    "elementwise bias": registered(Bounded, "bias"),
    "rounded": registered(Rounded),
    "factors": registered(Factors),
    "limited": registered(Limited),
    "watching": registered(Watching),
    "learnt": registered(Scaled),
    "older weight norm": nn.utils.weight_norm,
    "weight norm of inputs": partial(nn.utils.weight_norm, dim=1),
    "older spectral norm": nn.utils.spectral_norm,
    "pruned": partial(prune.l1_unstructured, name="weight", amount=0.3),
}
AXES = {"weight norm": {0}, "elementwise bias": {0, 1}, "mixed": {1}, "elementwise": {0, 1}}
AXES |= {
    "factors": {0, 1},
    "learnt": {0, 1},
    "mixed bias": {1},
    "older weight norm": {0},
    "weight norm of inputs": {1},
    "pruned": {0, 1},
}
"""Kinds to the dimensions of the weight along which parts follow from parts; of others, none."""


class Blocks(nn.Module):
    """Two MLPs; the first has computed weights."""

    def __init__(self, kind: str, both: bool) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(8, 16), nn.Linear(16, 8)
        self.fc2, self.proj2 = nn.Linear(8, 16), nn.Linear(16, 8)
        for layer in (self.fc, self.proj) if both else (self.fc,):
            KINDS[kind](layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(F.gelu(self.fc(x)))
        out: torch.Tensor = x + self.proj2(F.gelu(self.fc2(x)))
        return out


def made(kind: str, both: bool) -> Blocks:
    """Make the same model at each call, because weights that hooks computed cannot be copied."""
    torch.manual_seed(0)
    return Blocks(kind, both)


def each_apart(rank: int, kinds: Sequence[str], both: bool, plan: dict[str, str] | None) -> dict[str, tuple[float, set[str]]]:
    return {kind: apart(kind, both, plan) for kind in kinds}


def apart(kind: str, both: bool, plan: dict[str, str] | None) -> tuple[float, set[str]]:
    """Return the largest difference of gradients from the unmodified model's, and the names of split parameters."""
    model, whole = made(kind, both), made(kind, both)
    x = torch.randn(4, 8)
    schedule = create_schedule(model, example_inputs=(x,))
    schedule.tensor_parallel(plan)
    build(schedule)
    for either in (model, whole):
        either(x).square().sum().backward()
    found: dict[str, Any] = schedule.full_state("grad")
    worst = 0.0
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        worst = max(worst, float((found[name] - parameter.grad).abs().max()))
    return worst, {name for name, parameter in model.named_parameters() if shard_spec(parameter) is not None}


FAST = ("weight norm", "orthogonal", "mixed", "elementwise bias", "watching", "factors", "older weight norm")


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kinds", "both"),
    [(FAST, True), *(pytest.param(tuple(KINDS), both, marks=pytest.mark.slow) for both in (True, False))],
)
def test_a_derived_plan_splits_computed_weights_that_allow_it(kinds: tuple[str, ...], both: bool) -> None:
    rest = {"fc2.weight", "fc2.bias", "proj2.weight"}
    for found in run_distributed(each_apart, 2, kinds, both, None):
        for kind, (worst, split) in found.items():
            assert worst < 1e-5, kind
            assert split >= rest, kind
            axes = {0} if kind == "orthogonal" else AXES.get(kind, set())  # its rows are those of a buffer, which is split
            assert (split > rest) == ({0, 1} if both else {0}).issubset(axes), (kind, split)


@pytest.mark.multiproc
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_given_plan_splits_along_the_outputs(every: int) -> None:
    kinds = [kind for kind, axes in AXES.items() if 0 in axes][::every]
    for found in run_distributed(each_apart, 2, kinds, False, {"fc": "colwise", "proj": "rowwise"}):
        for kind, (worst, split) in found.items():
            assert worst < 1e-5, kind
            assert {name.split(".")[0] for name in split} == {"fc", "proj"}
            assert any(name.startswith(("fc.parametrizations", "fc.weight_")) for name in split), split


def refusals(rank: int, kinds: list[str]) -> dict[str, list[str]]:
    return {kind: _refusals(kind) for kind in kinds}


def _refusals(kind: str) -> list[str]:
    """Return the errors of splits along other dimensions."""
    split = [axis for axis in (0, 1) if axis not in AXES.get(kind, ())]
    ways: list[Callable[[Schedule], object]] = [
        partial(_plan, {"fc": "colwise", "proj": "rowwise"}),
        partial(_plan, {"proj": "rowwise", "fc": "colwise"}),
        *(partial(_shard, path, axis) for path in ("fc", "proj") for axis in split),
    ]
    said = []
    for way in ways:
        schedule = create_schedule(made(kind, True))
        said.append(message_of(partial(way, schedule)))
        assert all(shard_spec(each) is None for each in schedule.mod.parameters())
    return said


def _plan(plan: dict[str, str], schedule: Schedule) -> None:
    schedule.tensor_parallel(plan)


def _shard(path: str, axis: int, schedule: Schedule) -> None:
    schedule[path].shard("weight", axis=axis)


@pytest.mark.multiproc
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_wrong_split_of_a_computed_weight_is_refused_by_name(every: int) -> None:
    kinds = [kind for kind in KINDS if AXES.get(kind) != {0, 1}][::every]
    for found in run_distributed(refusals, 2, kinds):
        for kind, said in found.items():
            name = "'bias'" if "bias" in kind else "'weight'"
            assert all(f"{name} is computed by " in sentence for sentence in said), (kind, said)


def test_groups_that_the_ranks_would_cut_are_seen() -> None:
    layer = nn.Linear(16, 8)
    registered(Grouped)(layer)
    outputs = [{cut.output for cut in restricted_rule(LINEAR, layer, ranks).cuts} for ranks in (2, 4)]
    assert outputs == [{"sharded", "partial"}, {"sharded"}]


ATTENTIONS: dict[str, Callable[[Any], object]] = {
    "elementwise": lambda attn: parametrize.register_parametrization(attn, "in_proj_weight", Bounded()),
    "weight norm": lambda attn: parametrizations.weight_norm(attn, "in_proj_weight"),
    "pruned": lambda attn: prune.l1_unstructured(attn, "in_proj_weight", 0.3),
    "bias": lambda attn: parametrize.register_parametrization(attn, "in_proj_bias", Bounded()),
    "output": lambda attn: parametrize.register_parametrization(attn.out_proj, "weight", Bounded()),
    "output whole": lambda attn: parametrizations.spectral_norm(attn.out_proj),
}


class Attending(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)
        nn.init.normal_(self.attn.in_proj_bias)
        ATTENTIONS[kind](self.attn)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def attentions(rank: int) -> dict[str, tuple[float, set[str]]]:
    found = {}
    for kind in ATTENTIONS:
        model, whole, x = Attending(kind), Attending(kind), torch.randn(2, 3, 16)
        schedule = create_schedule(model, example_inputs=(x,))
        schedule.tensor_parallel()
        build(schedule)
        for each in (model, whole):
            each(x).square().sum().backward()
        grads: dict[str, Any] = schedule.full_state("grad")
        worst = max(float((grads[name] - each.grad).abs().max()) for name, each in whole.named_parameters())  # type: ignore[operator]
        found[kind] = worst, {name.split(".")[0] for name, each in model.named_parameters() if shard_spec(each) is not None}
    return found


@pytest.mark.multiproc
def test_attention_is_split_by_what_its_projections_are_computed_from() -> None:
    for found in run_distributed(attentions, 2):
        for kind, (worst, split) in found.items():
            assert worst < 1e-4, kind
            assert split == ({"up", "down"} if kind == "output whole" else {"attn", "up", "down"}), kind
