"""Plans derived from a model's own forward: the layers that are split, those that stay whole, and equal numerics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


class Block(nn.Module):
    """Attention and a gated MLP with names that no published plan has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.pieces, self.each = how, 4, 8
        self.make = nn.Linear(32, 96)
        self.back = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.norm = nn.LayerNorm(32)
        self.fat = nn.Linear(32, 128, bias=False)
        self.slim = nn.Linear(64, 32)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        batch, length, _ = x.shape
        if self.how == "split":
            return [
                part.view(batch, length, self.pieces, self.each) for part in self.make(x).split(self.pieces * self.each, dim=-1)
            ]
        if self.how == "three":
            return list(self.make(x).view(batch, length, 3, self.pieces, self.each).unbind(2))
        if self.how == "interleaved":
            return list(self.make(x).view(batch, length, self.pieces, 3 * self.each).chunk(3, dim=-1))
        made, width = self.make(x), self.pieces * self.each
        parts = [made[..., :width], made[..., width : 2 * width], made[..., 2 * width :]]
        return [part.unflatten(-1, (-1, self.each)) for part in parts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.heads(x))
        mixed = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        x = x + self.back(mixed.transpose(1, 2).flatten(2))
        gate, up = self.fat(self.norm(x)).chunk(2, dim=-1)
        return x + self.slim(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(how), Block(how)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _derived_steps(model: nn.Module, *inputs: torch.Tensor) -> list[str]:
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=inputs)
    sch.tensor_parallel()
    (step,) = sch.journal
    build(sch)
    assert_equivalent(before, model, *inputs)
    return [str(child) for child in step.children]


def _blocks(rank: int, how: str) -> list[str]:
    return _derived_steps(Model(how), torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["split", "three", "interleaved", "slices"])
def test_correctness_08_fused_attention_and_gated_mlp(how: str, ranks: int) -> None:
    fused = {"split": "[32, 32, 32]", "three": "[32, 32, 32]", "slices": "[32, 32, 32]", "interleaved": "1"}[how]
    splits = (
        f"sch['blocks.{{}}.make'].shard('weight', axis=0, blocks={fused})",
        "sch['blocks.{}.back'].shard('weight', axis=1, blocks=1)",
        "sch['blocks.{}.back'].sync('fwd_post', 'all_reduce')",
        "sch['blocks.{}.fat'].shard('weight', axis=0, blocks=[64, 64])",
        "sch['blocks.{}.slim'].shard('weight', axis=1, blocks=1)",
        "sch['blocks.{}.slim'].sync('fwd_post', 'all_reduce')",
    )
    inputs = ("sch['blocks.{}.make'].sync('bwd_post', 'all_reduce')", "sch['blocks.{}.fat'].sync('bwd_post', 'all_reduce')")
    own = ("sch['blocks.{}'].sync('grad', 'all_reduce')",)
    expected = [step.format(block) for steps in (splits, inputs, own) for block in range(2) for step in steps]
    assert run_distributed(_blocks, ranks, how)[0] == expected


class Unfit(nn.Module):
    """Layers that must stay whole, each for another reason."""

    def __init__(self, why: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.why, self.width = why, 8
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.in_, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(torch.tanh(self.in_(x)))
        one = self.one(x)
        if self.why == "softmax":
            one = one.softmax(-1)
        elif self.why == "sum":
            one = one + one.pow(2).mean(-1, keepdim=True)
        elif self.why == "with a whole value":
            one = one * x
        elif self.why == "reversed":
            one = one.flip(-1)
        elif self.why == "called twice":
            one = self.one(torch.tanh(one))
        elif self.why == "shape of the input":
            one = one.view(*x.shape[:-1], x.shape[-1] // 2, 2).tanh().flatten(-2)
        return self.two(one) + x


def _unfit(rank: int, why: str) -> list[str]:
    return _derived_steps(Unfit(why), torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("why", ["softmax", "sum", "with a whole value", "reversed", "called twice"])
def test_layers_whose_sharded_output_does_not_fit_stay_whole(why: str) -> None:
    steps = run_distributed(_unfit, 2, why)[0]
    assert {step.partition("]")[0] for step in steps} == {"sch['in_'", "sch['out'"}


class Numbered(nn.Module):
    """Three layers with numbered names, of which the first must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(torch.relu(self.fc2(self.fc1(x).softmax(-1))))


def _numbered(rank: int) -> list[str]:
    return _derived_steps(Numbered(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))


def test_layers_with_numbered_names_are_split_independently() -> None:
    assert {step.partition("]")[0] for step in run_distributed(_numbered, 2)[0]} == {"sch['fc2'", "sch['fc3'"}


class Projected(nn.Module):
    """Embedding narrower than the hidden layers, with a tied or untied head, or two tied layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.into, self.out = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.fc1, self.back1, self.fc2, self.back2 = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        if how == "tied head":
            self.head.weight = self.words.weight
        if how == "tied layers":
            self.back1.weight = self.fc1.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(self.into(self.words(ids)), (16,))
        for first, second in ((self.fc1, self.back1), (self.fc2, self.back2)):
            x = F.layer_norm(x + second(torch.relu(first(x))), (16,))
        logits: torch.Tensor = self.head(self.out(x))
        return logits


def _projected(rank: int, how: str) -> list[str]:
    return _derived_steps(Projected(how), torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("how", ["tied head", "untied head", "tied layers"])
def test_tied_layers_and_vocabularies_are_not_split_by_derivation(how: str) -> None:
    inner = {"fc2", "back2"} | ({"fc1", "back1"} if how != "tied layers" else set())
    split = {step.partition("'")[2].partition("'")[0] for step in run_distributed(_projected, 2, how)[0] if ".shard(" in step}
    assert split == inner | {"words", "head"}


def test_a_size_that_no_attribute_holds_is_divided() -> None:
    steps = run_distributed(_unfit, 2, "shape of the input")[0]
    assert {step.partition("]")[0] for step in steps} == {"sch['in_'", "sch['out'", "sch['one'", "sch['two'"}


class Scaled(nn.Module):
    """Count that must be local for a view and also scales the values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pieces, self.up, self.down = 4, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x).view(len(x), self.pieces, 4)).flatten(1) / self.pieces)


def _scaled(rank: int) -> list[str]:
    return _derived_steps(Scaled(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))


def test_an_attribute_that_scales_values_stays_whole() -> None:
    assert {step.partition("]")[0] for step in run_distributed(_scaled, 2)[0]} == {"sch['up'", "sch['down'"}


class Filled(nn.Module):
    """Constant of the sharded size that must be whole in one use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.in_, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(x), 16)
        weights = ones.softmax(-1)
        x = x + self.down(torch.tanh(self.up(x)) * ones) + weights[:, :8]
        return x + self.out(torch.tanh(self.in_(x)))


def _filled(rank: int) -> list[str]:
    return _derived_steps(Filled(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))


def test_the_search_ends_if_a_filled_tensor_must_stay_whole() -> None:
    assert any("in_" in step for step in run_distributed(_filled, 2, timeout=60)[0])


def _refused(rank: int, kind: str) -> None:
    model: Any = {"nothing": nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), "no inputs": Unfit("sum"), "hooks": Unfit("sum")}[
        kind
    ]
    if kind == "hooks":
        model.one.register_forward_hook(lambda module, args, output: output)
    given = {} if kind == "no inputs" else {"example_inputs": (torch.randn(3, 8),)}
    create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), **given).tensor_parallel()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "nothing of the Sequential can be split: .* sharded"),
        ("no inputs", "give example_inputs"),
        ("hooks", "'one' has hooks or a wrapped forward, which hide its layers; call tensor_parallel first"),
    ],
)
def test_refusals(kind: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        run_distributed(_refused, 2, kind)


class Whole(nn.Module):
    """Recurrent module, which has no sharding rule, beside layers that can be split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.recurrent(x)[0])))


def _whole(rank: int, is_hooked: bool) -> list[str]:
    model = Whole()
    if is_hooked:
        model.register_forward_hook(lambda module, args, output: output)
    return _derived_steps(model, torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_module_without_a_rule_stays_whole_and_a_hook_of_the_whole_model_hides_no_layers(is_hooked: bool) -> None:
    steps = run_distributed(_whole, 2, is_hooked)[0]
    assert {step.partition("]")[0] for step in steps} == {"sch['up'", "sch['down'"}
