"""Norms and MLPs that are almost what a kernel computes: each computes afterwards what it did, whatever it is given.

Most are left as they are. Where the kernel is what they compute for some inputs, it runs for these alone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import create_schedule
from tests.slapo_kernels.kernel_calls import COUNTED, Counted, counted_kernels

WIDTH = 8
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.01, torch.float64: 1e-12}
Middle = Callable[..., torch.Tensor]


@pytest.fixture
def counted() -> Iterator[Counted]:
    with counted_kernels() as found:
        yield found


class ClippedGradient(torch.autograd.Function):
    """Identity whose gradient is clipped for large inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clamp(-1e3, 1e3)


clip_gradient: Middle = ClippedGradient.apply


class Settings:
    """An object that nobody sees into."""

    scale = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * self.scale


def noted(self: Any, x: torch.Tensor, what: str) -> torch.Tensor:
    """The value, and a trace of the call in the module."""
    if what == "counter":
        self.count += 1
    elif what == "list":
        self.history.append(x.shape[0])
    elif what == "last shape":
        self.last = tuple(x.shape)
    elif what == "last value":
        self.last = x.detach()
    elif what == "tensor":
        self.total.add_(1)
    return x


def drawn(x: torch.Tensor, by: str) -> torch.Tensor:
    """The value, and numbers that nobody uses."""
    if by == "torch":
        torch.rand(1)
    else:
        random.random()
    return x


class Almost(nn.Module):
    """Base of the two kinds below."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.history, self.last, self.total = 0, list[int](), None, torch.zeros(())
        self.eps, self.settings = 1e-5, Settings()

    def state(self) -> tuple[Any, ...]:
        return self.count, list(self.history), self.last, float(self.total)


class Norm(Almost):
    """An RMSNorm, of what a test makes of its input, its weight and its result."""

    def __init__(self, middle: Middle, of: str = "input") -> None:
        super().__init__()
        self.weight, self.middle, self.of = nn.Parameter(torch.randn(WIDTH)), middle, of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.middle(self, x) if self.of == "input" else x
        wide = given.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self.middle(self, self.weight) if self.of == "weight" else self.weight
        result = weight * wide.to(x.dtype)
        return self.middle(self, result) if self.of == "result" else result


class Raw(Norm):
    """In the precision of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Gated(Almost):
    """An MLP whose middle a test gives."""

    def __init__(self, middle: Middle, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.act, self.middle = act or nn.SiLU(), middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.middle(self, self.gate(x), self.up(x)))  # type: ignore[no-any-return]


class Act(nn.Module):
    """An activation that a test gives."""

    def __init__(self, function: Middle) -> None:
        super().__init__()
        self.function, self.count = function, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return F.silu(x)


def without_autocast(self: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.act(gate) * up  # type: ignore[no-any-return]


def hooked(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(-1e3, 1e3))
    return x


NORMS: dict[str, Callable[[], nn.Module]] = {
    "clamped to half precision": lambda: Norm(lambda self, x: x.clamp(-65504, 65504)),
    "clamped": lambda: Norm(lambda self, x: x.clamp(-300, 300)),
    "clipped by minimum": lambda: Norm(lambda self, x: torch.minimum(x, torch.full_like(x, 1e3))),
    "without infinities": lambda: Norm(lambda self, x: torch.nan_to_num(x)),
    "without infinities by where": lambda: Norm(lambda self, x: torch.where(x.isfinite(), x, 0.0)),
    "capped by tanh": lambda: Norm(lambda self, x: 1e6 * torch.tanh(x / 1e6)),
    "clamped weight": lambda: Norm(lambda self, w: w.clamp(-100, 100), "weight"),
    "clamped result": lambda: Norm(lambda self, y: y.clamp(-1e4, 1e4), "result"),
    "clamped in evaluation": lambda: Norm(lambda self, x: x if self.training else x.clamp(-300, 300)),
    "clamped where large": lambda: Norm(lambda self, x: x.clamp(-300, 300) if x.abs().max() > 300 else x),
    "another above 64": lambda: Norm(lambda self, x: x * 2.0 if x.shape[0] > 64 else x * 1.0),
    "another of one": lambda: Norm(lambda self, x: x + 1.0 if x.shape[0] == 1 else x + 0.0),
    "counter": lambda: Norm(lambda self, x: noted(self, x, "counter")),
    "list": lambda: Norm(lambda self, x: noted(self, x, "list")),
    "last shape": lambda: Norm(lambda self, x: noted(self, x, "last shape")),
    "last value": lambda: Norm(lambda self, x: noted(self, x, "last value")),
    "tensor that counts": lambda: Norm(lambda self, x: noted(self, x, "tensor")),
    "numbers drawn": lambda: Norm(lambda self, x: drawn(x, "torch")),
    "numbers drawn by Python": lambda: Norm(lambda self, x: drawn(x, "python")),
    "noise": lambda: Norm(lambda self, x: x + 1e-7 * torch.randn_like(x) if self.training else x),
    "clipped gradient": lambda: Norm(lambda self, x: clip_gradient(x)),
    "hooked gradient": lambda: Norm(lambda self, x: hooked(x * 1.0)),
    "in place": lambda: Norm(lambda self, y: y.mul_(1.0), "result"),
    "scaled by what cannot be compared": lambda: Norm(lambda self, x: x * self.settings.scale),
    "another without gradients": lambda: Norm(lambda self, x: x if torch.is_grad_enabled() else x * 2.0),
    "another in inference mode": lambda: Norm(lambda self, x: x * 2.0 if torch.is_inference_mode_enabled() else x),
    "another for inputs that are packed": lambda: Norm(lambda self, x: x if x.is_contiguous() else x * 2.0),
    "another by strides": lambda: Norm(lambda self, x: x if x.stride(-1) == 1 else x * 2.0),
    "another for frozen weights": lambda: Norm(lambda self, w: w if w.requires_grad else w * 2.0, "weight"),
}
"""Left as they are."""

GATES: dict[str, Callable[[], nn.Module]] = {
    "clamped gate": lambda: Gated(lambda self, gate, up: self.act(gate.clamp(-1e3, 1e3)) * up),
    "clamped up": lambda: Gated(lambda self, gate, up: self.act(gate) * up.clamp(max=1e5)),
    "clamped product": lambda: Gated(lambda self, gate, up: (self.act(gate) * up).clamp(-65504, 65504)),
    "hardtanh": lambda: Gated(lambda self, gate, up: self.act(F.hardtanh(gate, -1e5, 1e5)) * up),
    "threshold": lambda: Gated(lambda self, gate, up: self.act(F.threshold(gate, -1e5, -1e5)) * up),
    "without infinities": lambda: Gated(lambda self, gate, up: self.act(gate) * torch.nan_to_num(up)),
    "where": lambda: Gated(lambda self, gate, up: torch.where(gate.abs() < 1e5, self.act(gate) * up, 0.0)),
    "capped by tanh": lambda: Gated(lambda self, gate, up: self.act(1e4 * torch.tanh(gate / 1e4)) * up),
    "wide": lambda: Gated(lambda self, gate, up: (self.act(gate.float()) * up).to(gate.dtype)),
    "wide up": lambda: Gated(lambda self, gate, up: (self.act(gate) * up.to(torch.float32)).to(gate.dtype)),
    "wide activation": lambda: Gated(
        lambda self, gate, up: self.act(gate) * up, Act(lambda self, x: F.silu(x.float()).to(x.dtype))
    ),
    "clamped activation": lambda: Gated(lambda self, gate, up: self.act(gate) * up, Act(lambda self, x: F.silu(x.clamp(-1e5)))),
    "activation that counts": lambda: Gated(lambda self, gate, up: self.act(gate) * up, Act(counting)),
    "activation of one mode": lambda: Gated(
        lambda self, gate, up: self.act(gate) * up, Act(lambda self, x: F.silu(x) if self.training else F.gelu(x))
    ),
    "activation in place": lambda: Gated(lambda self, gate, up: self.act(gate) * up, nn.SiLU(inplace=True)),
    "clipped gradient": lambda: Gated(lambda self, gate, up: self.act(clip_gradient(gate)) * up),
    "hooked gradient": lambda: Gated(lambda self, gate, up: self.act(hooked(gate)) * up),
    "no gradient": lambda: Gated(lambda self, gate, up: self.act(gate) * up.detach()),
    "no autocast": lambda: Gated(without_autocast),
    "counter": lambda: Gated(lambda self, gate, up: self.act(noted(self, gate, "counter")) * up),
    "list": lambda: Gated(lambda self, gate, up: self.act(noted(self, gate, "list")) * up),
    "last shape": lambda: Gated(lambda self, gate, up: self.act(noted(self, gate, "last shape")) * up),
    "tensor that counts": lambda: Gated(lambda self, gate, up: self.act(noted(self, gate, "tensor")) * up),
    "numbers drawn": lambda: Gated(lambda self, gate, up: self.act(drawn(gate, "torch")) * up),
    "numbers drawn by Python": lambda: Gated(lambda self, gate, up: self.act(drawn(gate, "python")) * up),
    "another above 64": lambda: Gated(lambda self, gate, up: self.act(gate) * up * (2.0 if len(gate) > 64 else 1.0)),
    "another where large": lambda: Gated(lambda self, gate, up: self.act(gate) * up if gate.max() < 1e3 else up),
    "scaled by what cannot be compared": lambda: Gated(lambda self, gate, up: self.settings(gate) * up),
    "another without gradients": lambda: Gated(
        lambda self, gate, up: self.act(gate) * (up if torch.is_grad_enabled() else -up)
    ),
    "another by strides": lambda: Gated(lambda self, gate, up: self.act(gate) * (up if up.stride(-1) == 1 else -up)),
}
"""Left as they are."""

SOME: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "clamped in half precision": (
        lambda: Norm(lambda self, x: x.clamp(-300, 300) if x.dtype == torch.float16 else x),
        "rms_norm",
    ),
    "in its own precision": (lambda: Raw(lambda self, x: x), "rms_norm"),
    "in double precision": (lambda: Norm(lambda self, x: x.double()), "rms_norm"),
    "clamped rows of two dimensions": (lambda: Norm(lambda self, x: x.clamp(-300, 300) if x.dim() == 2 else x), "rms_norm"),
    "half of the gate in two dimensions": (
        lambda: Gated(lambda self, gate, up: self.act(gate) * up * 0.5 if gate.dim() == 2 else self.act(gate) * up),
        "swiglu",
    ),
    "gate as a formula": (lambda: Gated(lambda self, gate, up: gate * torch.sigmoid(gate) * up), "swiglu"),
    "gate": (lambda: Gated(lambda self, gate, up: self.act(gate) * up), "swiglu"),
    "norm": (lambda: Norm(lambda self, x: x), "rms_norm"),
}
"""A kernel serves some of their inputs."""


def inputs(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for shape in ((1,), (3,), (70, 1), (1, 1), (2, 3), (66, 2), (2, 1, 2, 2)):
        for scale in (1.0, 1e-3, 1e4):
            yield (torch.randn(*shape, WIDTH, generator=generator) * scale).to(dtype)
    for odd in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(2, 3, WIDTH, generator=generator)
        x[0, 0, 0] = odd
        yield x.to(dtype)


def outcome(module: Any, x: torch.Tensor) -> tuple[list[torch.Tensor], Any, Any]:
    """Values and gradients, what the module is left with, and the next random numbers."""
    torch.manual_seed(1)
    random.seed(1)
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    largest = 1.0 if out.dtype == torch.float16 else 1e4  # of gradients: beyond, sums of products overflow
    out.backward(torch.linspace(-largest, largest, out.numel()).view(out.shape).to(out.dtype))
    values = [out.detach(), x.grad, *(each.grad for each in module.parameters() if each.grad is not None)]
    return values, module.state(), (torch.rand(1).item(), random.random())


def assert_same(before: nn.Module, after: nn.Module, dtype: torch.dtype) -> None:
    """In both modes, for all inputs; rounding counts by the largest number of each tensor."""
    for x in inputs(dtype):
        for training in (True, False):
            expected, given, drawn_before = outcome(before.train(training), x)
            found, taken, drawn_after = outcome(after.train(training), x)
            assert drawn_after == drawn_before
            for one, other in ((given[:2], taken[:2]), (given[3:], taken[3:])):
                assert one == other
            assert isinstance(given[2], torch.Tensor) or given[2] == taken[2]
            for one, other in zip(expected, found, strict=True):
                largest = torch.nan_to_num(one.float(), 0, 0, 0).abs().max().item()
                torch.testing.assert_close(other, one, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * largest, equal_nan=True)


def use_counted_kernels(module: nn.Module, dtype: torch.dtype, counted: Counted) -> tuple[nn.Module, nn.Module, set[str]]:
    before = module.to(dtype)
    model = nn.Sequential(copy.deepcopy(before))
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule.use_kernels(force=COUNTED)
    return before, model[0], set(schedule.metadata.primitives["use_kernels"])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*(f"norm: {name}" for name in NORMS), *(f"gate: {name}" for name in GATES)])
def test_what_is_left_as_it_is(name: str, counted: Counted) -> None:
    kind, _, case = name.partition(": ")
    for dtype in (torch.float32, torch.bfloat16):
        before, after, found = use_counted_kernels((NORMS if kind == "norm" else GATES)[case](), dtype, counted)
        assert not found
        assert type(after) is type(before)
        assert after.state() == before.state()  # type: ignore[operator]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_what_is_served_for_some_inputs(name: str, dtype: torch.dtype, counted: Counted) -> None:
    make, kernel = SOME[name]
    before, after, found = use_counted_kernels(make(), dtype, counted)
    assert found == {kernel}
    assert_same(before, after, dtype)
