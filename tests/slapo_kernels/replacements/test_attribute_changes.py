"""After a change of an attribute that a forward reads, the original forward runs until it is changed back."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import create_schedule
from slapo_verify.comparison import assert_equivalent
from tests.slapo_kernels.kernel_calls import COUNTED, Counted, counted_kernels


@pytest.fixture
def counted() -> Iterator[Counted]:
    with counted_kernels() as found:
        yield found


class Rms(nn.Module):
    """A norm as Gemma writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.never_read = nn.Parameter(torch.randn(8)), 1e-5, 1

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


class Mlp(nn.Module):
    """With an activation that is a function, and a scale."""

    def __init__(self, act: Callable[..., Any] = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.act, self.scales = nn.Linear(8, 16), nn.Linear(16, 8), act, [1.0, 1.0]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """An activation as a method."""
        return F.silu(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x) * self.scales[0]))  # type: ignore[no-any-return]


def with_own_act() -> Mlp:
    module = Mlp()
    module.act = module.own
    return module


CHANGES: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Any], None]]] = {
    "epsilon of a LayerNorm": (lambda: nn.LayerNorm(8), "layer_norm", lambda module: setattr(module, "eps", 1.0)),
    "epsilon of an RMSNorm": (Rms, "rms_norm", lambda module: setattr(module, "eps", 1.0)),
    "method of a norm": (Rms, "rms_norm", lambda module: setattr(module, "_norm", torch.tanh)),
    "function": (Mlp, "bias_act", lambda module: setattr(module, "act", F.relu)),
    "method": (with_own_act, "bias_act", lambda module: setattr(module, "act", module.down.forward)),
    "partial function": (
        lambda: Mlp(functools.partial(F.gelu, approximate="tanh")),
        "bias_act",
        lambda module: setattr(module, "act", functools.partial(F.gelu, approximate="none")),
    ),
    "number in a list": (Mlp, "bias_act", lambda module: module.scales.__setitem__(0, 2.0)),
    "setting of a part": (lambda: Mlp(nn.GELU()), "bias_act", lambda module: setattr(module.act, "approximate", "tanh")),
}
X = torch.randn(2, 3, 8) * 2


def use_counted_kernels(module: nn.Module, counted: Counted, force: dict[str, str] | None) -> Any:
    model = nn.Sequential(module)
    create_schedule(model, plugins=counted.plugins).use_kernels(force=force)
    return model[0]


def compare(before: nn.Module, after: Any) -> None:
    """Values and all gradients."""
    found = []
    for module in (before, after):
        module.zero_grad()
        x = X.clone().requires_grad_()
        out = module(x)
        out.square().sum().backward()
        found.append([out, x.grad, *(each.grad for each in module.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "method"])
def test_what_is_changed_counts(name: str, counted: Counted) -> None:
    make, kernel, change = CHANGES[name]
    module = make()
    before, after = copy.deepcopy(module), use_counted_kernels(module, counted, COUNTED)
    compare(before, after)
    assert counted.calls == {kernel: 1}
    plain = before(X)
    change(before)
    change(after)
    assert not torch.allclose(before(X), plain)
    compare(before, after)
    assert counted.calls == {kernel: 1}


def test_what_is_not_read_does_not_count(counted: Counted) -> None:
    module = use_counted_kernels(Rms(), counted, COUNTED)
    module.never_read, module.another = 2, object()
    module(X)
    assert counted.calls == {"rms_norm": 1}


def test_what_is_changed_back(counted: Counted) -> None:
    module = use_counted_kernels(nn.LayerNorm(8), counted, COUNTED)
    module.eps = 1.0
    module(X)
    assert not counted.calls
    module.eps = float("1e-5")
    module(X)
    assert counted.calls == {"layer_norm": 1}


def test_embeddings_that_are_to_do_more(counted: Counted) -> None:
    model = nn.Sequential(nn.Embedding(10, 8))
    before, ids = copy.deepcopy(model), torch.arange(10)
    create_schedule(model, plugins=counted.plugins).use_kernels("embedding", force=COUNTED)
    before[0].max_norm = model[0].max_norm = 0.5
    assert torch.equal(model(ids), before(ids))
    assert not counted.calls


def test_a_forward_that_is_patched_into_the_class(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    module = use_counted_kernels(Rms(), counted, COUNTED)
    monkeypatch.setattr(Rms, "forward", lambda self, x: x + 1)
    assert torch.equal(module(X), X + 1)
    assert not counted.calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"])  # noqa: S301
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "method of a norm"])
def test_copies_go_by_their_own(name: str, again: Callable[[Any], Any], counted: Counted) -> None:
    make, kernel, change = CHANGES[name]
    module = use_counted_kernels(make(), counted, COUNTED)
    other = again(module)
    other(X)
    assert counted.calls == {kernel: 1}
    if name != "method":
        change(other)
        other(X)
    assert counted.calls == {kernel: 1}
    module(X)
    assert counted.calls == {kernel: 2}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["epsilon of a LayerNorm", "method of a norm", "function", "setting of a part"])
def test_a_compiler_sees_kernels_that_are_forced_and_changes(name: str, counted: Counted) -> None:
    make, kernel, change = CHANGES[name]
    module = make()
    before, after = copy.deepcopy(module), use_counted_kernels(module, counted, {kernel: "eager"})
    compiled = torch.compile(after, backend="eager", fullgraph=True)
    compare(before, compiled)
    change(before)
    change(after)
    compare(before, compiled)


class Attention(nn.Module):
    """Written out, with what a test adds to the scores or masks out."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.proj, self.mask = nn.Linear(16, 16), nn.Parameter(mask) if mask.is_floating_point() else mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.proj(x).unflatten(-1, (4, 4)).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2) * 0.5
        return ((scores + self.mask).softmax(-1) @ heads).transpose(1, 2).flatten(2)


class Masked(Attention):
    """Attention whose mask is True for hidden keys."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.proj(x).unflatten(-1, (4, 4)).transpose(1, 2)
        scores = (heads @ heads.transpose(-1, -2) * 0.5).masked_fill(self.mask, -math.inf)
        return (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("force", ["native", "eager"])
@pytest.mark.parametrize(
    ("kind", "mask", "is_served"),
    [
        (Attention, torch.linspace(-1, 1, 5), True),
        (Attention, torch.tensor(0.5), True),
        (Attention, torch.randn(5, 5), True),
        (Attention, torch.randn(4, 1, 5), True),
        (Attention, torch.arange(5), False),
        (Attention, torch.tensor([True, True, False, True, False]), False),
        (Masked, torch.tensor([True, True, False, True, False]), True),
    ],
    ids=["row", "number", "square", "heads", "integers", "truths", "masked row"],
)
def test_masks_of_few_dimensions(
    kind: type[Attention], mask: torch.Tensor, is_served: bool, force: str, counted: Counted
) -> None:
    module, x = kind(mask), torch.randn(2, 5, 16)
    before = copy.deepcopy(module)
    schedule = create_schedule(module, plugins=counted.plugins, example_inputs=(x,))
    schedule.trace(flatten=True)
    schedule.use_kernels(force={"attention": force} if is_served else None)
    assert ("attention" in schedule.metadata.primitives["use_kernels"]) is is_served
    assert_equivalent(before, schedule.mod, x)
