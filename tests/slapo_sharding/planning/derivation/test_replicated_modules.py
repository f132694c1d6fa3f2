"""Models with a module that cannot be split: the rest is split, and a warning names the module, its line and the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import ScheduleError, build
from slapo_testing import run_distributed
from tests.slapo_sharding.handwritten import SPLIT, D, GatedMlp, H, Net
from tests.slapo_sharding.handwritten_others import WHOLE, LoopedHeads, ThreeHeads
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_sharding.planning.local_sizes.test_handwritten import split, tokens

pytestmark = pytest.mark.multiproc


class Drawing(nn.Module):
    """Random numbers for sharded and for whole values, and an MLP beside."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.mlp = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), GatedMlp()

    def forward(self, x):
        kept = self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training))
        return F.dropout(kept, 0.5, self.training) + self.mlp(x)


class Deciding(nn.Module):
    """Small network with a data-dependent branch."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        if x.mean() > 10:
            x = -x
        return self.down(torch.relu(self.up(x))), {"sizes": [x.abs().mean()]}


class DecidingBeside(nn.Module):
    def __init__(self):
        super().__init__()
        self.decide, self.attn = Deciding(), SPLIT["SplitByWidth"]()

    def forward(self, x):
        x, facts = self.decide(x + self.attn(x))
        return x + facts["sizes"][0]


class Counting(nn.Module):
    """Attention beside a count of calls."""

    def __init__(self):
        super().__init__()
        self.inner, self.attn = Calls(), SPLIT["SplitByWidth"]()

    def forward(self, x):
        return self.inner(self.attn(x))


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.up, self.down = 0, nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        self.calls += 1
        return self.down(self.up(x).relu())


class Misleading(nn.Module):
    """Attention whose number of key heads differs from that of its projections."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads, self.mlp = D // H, H, 3, GatedMlp()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) + self.mlp(x)


class SharedNorm(nn.Module):
    """Norm that is called with pieces of sharded and of whole values."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), GatedMlp()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        pieces = self.norm(self.up(x).unflatten(-1, (-1, 8)))
        return self.down(torch.tanh(pieces.flatten(-2))) + self.norm(x.unflatten(-1, (-1, 8))).flatten(-2) + self.mlp(x)


LEFT = {
    "draws": (
        Drawing,
        {"mlp.up", "mlp.down"},
        r"part.up .*draws random numbers for sharded and for whole values \(\S+replicated_modules.py:\d+\)",
    ),
    "decides": (
        DecidingBeside,
        {"attn.c_attn", "attn.c_proj"},
        r"part.decide .*the forward .*\(\S+replicated_modules.py:\d+\)",
    ),
    "counts calls": (
        Counting,
        {"attn.c_attn", "attn.c_proj"},
        r"part.inner.* assigns to its attribute 'calls' .*leave the assignment out$",
    ),
    "misleads": (Misleading, {"mlp.up", "mlp.down"}, r"part.q_proj .*num_kv_heads of the attention module is 3"),
}


def split_part(rank: int, kind: Callable[[], nn.Module]) -> tuple[set[str], list[str]]:
    """Compare outputs and gradients for several shapes; return the split layers of the module, and the warnings."""
    torch.manual_seed(0)
    expected, model = Net(kind), Net(kind)
    model.load_state_dict(expected.state_dict())
    with warnings_told() as told:
        sch = split(model)
    build(sch)
    if kind is Drawing:  # masks differ by their nature
        expected.eval()
        model.eval()
    for number, shape in enumerate(((2, 8), (3, 12), (2, 8))):
        given = tokens(*shape, seed=number)
        for each in (expected, model):
            each.zero_grad()
            each(given).square().mean().backward()
        torch.testing.assert_close(model(given), expected(given), atol=1e-5, rtol=1e-4)
        gradients = sch.full_state("grad")
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-3)
    for each in (expected, model):  # torch's own layers run by another path then
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(given), expected(given), atol=1e-5, rtol=1e-4)
    steps = (re.match(r"sch\['blocks\.0\.part\.(\S*)'\]\.shard", str(step)) for step in sch.journal.steps[0].children)
    return {found[1] for found in steps if found}, told


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LEFT)
def test_the_rest_is_split_and_a_warning_names_the_module(name: str) -> None:
    kind, paths, message = LEFT[name]
    for found, told in run_distributed(split_part, 2, kind):
        assert found == paths
        assert re.match(f"tensor_parallel: blocks.0.{message}", told[0]), told
        beside = paths and message.startswith("part.up")  # then the layer that would take its output in is named, too
        assert [each.split()[1] for each in told[1:]] == ["blocks.0.part.down"] * bool(beside), told


def console_output(rank: int) -> str:
    """Return the console output of a rank."""
    with redirect_stderr(StringIO()) as console:
        split(Net(DecidingBeside))
    return console.getvalue()


def test_warnings_are_shown_by_one_rank() -> None:
    first, second = run_distributed(console_output, 2)
    assert "part.decide stays whole" in first
    assert second == ""


def test_layers_before_a_norm_of_sharded_and_whole_values_stay_whole() -> None:
    for found, told in run_distributed(split_part, 2, SharedNorm):
        assert found == {"mlp.up", "mlp.down"}
        assert [each.split()[1] for each in told] == ["blocks.0.part.down", "blocks.0.part.up"]
        assert "parameters of 'blocks.0.part.norm' are used on whole values too" in told[1]


def beside(rank: int, kinds: list[type[nn.Module]]) -> dict[str, list[str]]:
    """Return the warnings for each kind beside an MLP; check that the MLP is split."""
    found = {}
    for kind in kinds:
        paths, told = split_part(rank, partial(Beside, kind))
        assert paths == {"mlp.up", "mlp.down"}, kind
        found[kind.__name__] = told
    return found


class OnTop(nn.Module):
    """Cut of a whole value in the forward of the model, and in an attention inside."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attn = nn.Embedding(64, D), SPLIT["Temperature"]()
        self.up, self.down, self.scale = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, ids):
        x = self.attn(self.embedding(ids))
        pieces = self.up(x).unflatten(-1, (8, -1)) * self.scale[:, None]
        return self.down(torch.tanh(pieces.flatten(-2)))


def on_top(rank: int) -> set[str]:
    torch.manual_seed(0)
    expected, model = OnTop(), OnTop()
    model.load_state_dict(expected.state_dict())
    sch = split(model)
    build(sch)
    for shape in ((2, 8), (3, 12)):
        for each in (expected, model):
            each.zero_grad()
            each(tokens(*shape)).square().mean().backward()
        torch.testing.assert_close(model(tokens(*shape)), expected(tokens(*shape)), atol=1e-5, rtol=1e-4)
        gradients = sch.full_state("grad")
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-3)
    whole = dict(expected.named_parameters())
    return {name.partition(".")[0] for name, own in model.named_parameters() if own.shape != whole[name].shape}


def test_a_value_that_cannot_be_cut_does_not_affect_other_modules() -> None:
    assert run_distributed(on_top, 2)[0] == {"attn"}


class PackedLinear(nn.Module):
    """Frozen layer of a user: two 4-bit numbers in a byte."""

    def __init__(self):
        super().__init__()
        numbers = torch.randint(256, (D, D // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.register_buffer("packed", numbers)
        self.register_buffer("scales", torch.full((D, 1), 0.02))

    def forward(self, x):
        pairs = torch.stack([(self.packed & 15).to(x.dtype) - 8, (self.packed >> 4).to(x.dtype) - 8], -1)
        return F.linear(x, pairs.flatten(1) * self.scales)


class Scaled(torch.autograd.Function):
    """Autograd function, as kernels of quantized layers are called."""

    @staticmethod
    def forward(ctx, x, numbers, scale):
        ctx.save_for_backward(numbers, scale)
        return x @ (numbers.to(x.dtype) * scale).T

    @staticmethod
    def backward(ctx, gradient):
        numbers, scale = ctx.saved_tensors
        return gradient @ (numbers.to(gradient.dtype) * scale), None, None


class KernelLinear(nn.Module):
    """Frozen layer that calls an ``autograd.Function``."""

    def __init__(self):
        super().__init__()
        numbers = torch.randint(-9, 9, (D, D), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
        self.register_buffer("numbers", numbers)
        self.register_buffer("scale", torch.full((D, 1), 0.02))

    def forward(self, x):
        return Scaled.apply(x, self.numbers, self.scale)


class UnregisteredLinear(nn.Module):
    """Layer whose weight is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = torch.linspace(-0.1, 0.1, D * D).view(D, D)

    def forward(self, x):
        return F.linear(x, self.weight)


class Grouped(nn.Module):
    """Layer with a block-diagonal weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.3, 0.3, D * D // 4).view(4, D // 4, D // 4))

    def forward(self, x):
        return torch.einsum("btgi,gio->btgo", x.unflatten(-1, (4, -1)), self.weight).flatten(2)


class OwnLayers(nn.Module):
    """Attention with layers of a class without a rule."""

    def __init__(self, layer):
        super().__init__()
        self.q, self.k, self.v, self.o, self.heads = layer(), layer(), layer(), layer(), 4

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (each(x).view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class Beside(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.one, self.mlp = kind(), GatedMlp()

    def forward(self, x):
        return self.one(x) + self.mlp(x)


FAST = (LoopedHeads, ThreeHeads)
SLOW = tuple(kind for kind in WHOLE if kind not in FAST)
UNKNOWN = (PackedLinear, KernelLinear, UnregisteredLinear, Grouped)


@pytest.mark.parametrize("kinds", [pytest.param(FAST, id="some"), pytest.param(SLOW, id="others", marks=pytest.mark.slow)])
def test_modules_that_stay_whole_are_correct_and_named(kinds: tuple[type[nn.Module], ...]) -> None:
    for found in run_distributed(beside, 2, list(kinds), timeout=120):
        for name, told in found.items():
            expected = r"tensor_parallel: blocks\.0\.part\.one[\w.]* stays whole on every rank: .*\(\S+:\d+\)"
            assert told, name
            assert all(re.fullmatch(expected, message) for message in told), told


def of_own_layers(rank: int, layers: tuple[type[nn.Module], ...]) -> dict[str, list[str]]:
    found = {}
    for layer in layers:
        paths, told = split_part(rank, partial(Beside, partial(OwnLayers, layer)))
        assert paths == {"mlp.up", "mlp.down"}, layer
        found[layer.__name__] = told
    return found


@pytest.mark.parametrize("layers", [(PackedLinear, KernelLinear), pytest.param(UNKNOWN, marks=pytest.mark.slow)])
def test_layers_without_a_rule_are_named(layers: tuple[type[nn.Module], ...]) -> None:
    for found in run_distributed(of_own_layers, 2, layers, timeout=120):
        expected = r"tensor_parallel: blocks\.0\.part\.one stays whole on every rank: no rule splits its products \(\S+:\d+\)"
        for name, told in found.items():
            assert [bool(re.fullmatch(expected, each)) for each in told] == [True], (name, told)


def split_refusal(rank: int) -> str:
    model = nn.Sequential(nn.Embedding(64, D), nn.Sequential(Calls()))
    parameters = list(model.parameters())
    with pytest.raises(ScheduleError) as caught:
        split(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    return str(caught.value)


def test_an_error_without_any_split_names_a_remedy() -> None:
    first, second = run_distributed(split_refusal, 2)
    assert first == second
    assert "nothing of the Sequential can be split: the forward of a Calls assigns to its attribute 'calls'" in first
    assert "layers are split in pairs, a column-parallel one whose sharded output reaches a row-parallel one" in first
