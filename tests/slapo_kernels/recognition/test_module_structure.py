"""Recognition of modules by ``use_kernels``: a module that almost computes a kernel keeps its forward."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Schedule, ScheduleError, create_schedule
from slapo_verify.comparison import assert_equivalent
from tests.slapo_kernels.kernel_calls import COUNTED, Counted, counted_kernels


@pytest.fixture
def counted() -> Iterator[Counted]:
    with counted_kernels() as found:
        yield found


class Gated(nn.Module):
    """An MLP whose middle a test gives."""

    def __init__(self, middle: Callable[..., Any], act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.act, self.middle = act or nn.SiLU(), middle

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.middle(self, self.gate(hidden), self.up(hidden)))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """An MLP whose activation a test gives."""

    def __init__(self, act: Callable[..., Any], bias: bool = True) -> None:
        super().__init__()
        self.fc1, self.drop, self.fc2, self.act = nn.Linear(8, 96, bias=bias), nn.Dropout(0.3), nn.Linear(96, 8), act

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.drop(self.act(self.fc1(hidden))))  # type: ignore[no-any-return]


def check(module: nn.Module, counted: Counted, expected: dict[str, int], *inputs: torch.Tensor) -> Schedule:
    """Swap all there is, see what ran, and compare in both modes and for several batches."""
    schedule = create_schedule(nn.Sequential(module), plugins=counted.plugins)
    before = copy.deepcopy(module)
    schedule.use_kernels(force=COUNTED)
    after = schedule["0"].mod
    for shape in ((2, 3), (5,), (1, 2, 2)):
        given = inputs or (torch.randn(*shape, 8, requires_grad=True),)
        for training in (True, False):
            counted.calls.clear()
            after.train(training)(*given)
            assert counted.calls == expected
            assert_equivalent(before.train(training), after, *given)
    return schedule


GATED: dict[str, tuple[Callable[..., Any], nn.Module | None, str]] = {
    "swiglu": (lambda self, gate, up: self.act(gate) * up, None, "swiglu"),
    "gate and up swapped": (lambda self, gate, up: gate * self.act(up), None, "swiglu"),
    "as a formula": (lambda self, gate, up: up * (gate * torch.sigmoid(gate)), None, "swiglu"),
    "geglu": (lambda self, gate, up: self.act(gate) * up, nn.GELU(), "geglu"),
    "approximated geglu": (lambda self, gate, up: F.gelu(gate, approximate="tanh") * up, None, "geglu"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", GATED)
def test_gated(name: str, counted: Counted) -> None:
    middle, act, kernel = GATED[name]
    check(Gated(middle, act), counted, {kernel: 1})


def _uses_twice(self: Any, gate: torch.Tensor, up: torch.Tensor) -> Any:
    activated = self.act(gate)
    return activated * up + 0.1 * self.up.weight.sum() * activated


ALMOST_GATED: dict[str, tuple[Callable[..., Any], nn.Module | None]] = {
    "another activation": (lambda self, gate, up: self.act(gate) * up, nn.Sigmoid()),
    "the same value twice": (lambda self, gate, up: self.act(gate) * gate, None),
    "a constant": (lambda self, gate, up: self.act(gate) * up * 1.01, None),
    "a sum": (lambda self, gate, up: self.act(gate) + up, None),
    "an extra user": (_uses_twice, None),
    "a shift": (lambda self, gate, up: self.act(gate) * (up + 1), None),
    "clamped": (lambda self, gate, up: self.act(gate.clamp(max=10.0)) * up, None),
    "no gradient to the gate": (lambda self, gate, up: self.act(gate.detach()) * up, None),
    "over the row": (lambda self, gate, up: gate.softmax(-1) * up, None),
    "only in training": (lambda self, gate, up: self.act(gate) * up if self.training else self.act(gate), None),
    "of a single token": (lambda self, gate, up: self.act(gate) * up if gate.shape[-2] > 1 else gate * up, None),
    "dropped in between": (lambda self, gate, up: self.act(gate) * F.dropout(up, 0.5, self.training), None),
    "in place": (lambda self, gate, up: self.act(gate).mul_(up), None),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ALMOST_GATED)
def test_almost_gated(name: str, counted: Counted) -> None:
    check(Gated(*ALMOST_GATED[name]), counted, {})


def _gelu_new(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, tuple[Callable[..., Any], str | None]] = {
    "exact gelu": (nn.GELU(), "gelu"),
    "approximated gelu": (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh"),
    "gelu by erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "gelu of GPT-2": (_gelu_new, "gelu_new"),
    "gelu of CLIP": (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
    "relu": (nn.ReLU(), "relu"),
    "squared relu": (lambda x: F.relu(x).square(), "relu2"),
    "silu": (nn.SiLU(), "silu"),
    "leaky relu": (nn.LeakyReLU(0.001), None),
    "clipped gelu": (lambda x: F.gelu(x).clamp(-10, 10), None),
    "mish": (nn.Mish(), None),
    "random slopes": (nn.RReLU(), None),
    "slopes that are learnt": (nn.PReLU(), None),
    "identity": (nn.Identity(), None),
    "double": (lambda x: x + x, None),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_correctness_15_activations_are_told_apart(name: str, counted: Counted) -> None:
    """Correctness 15: exact and approximated GELU."""
    act, expected = ACTIVATIONS[name]
    schedule = check(Plain(act), counted, {"bias_act": 1} if expected else {})
    steps = list(getattr(getattr(schedule["0"].mod, "_slapo_kernels", None), "steps", ()))
    assert [step.activation for step in steps if hasattr(step, "activation")] == ([expected] if expected else [])


def test_halves_of_one_projection(counted: Counted) -> None:
    class Fused(nn.Module):
        def __init__(self, gate_first: bool) -> None:
            super().__init__()
            self.gate_up, self.down, self.gate_first = nn.Linear(8, 32), nn.Linear(16, 8), gate_first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.gate_up(x).chunk(2, dim=-1)
            return self.down(F.silu(first) * second if self.gate_first else first * F.silu(second))  # type: ignore[no-any-return]

    class Interleaved(Fused):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = self.gate_up(x)
            return self.down(F.silu(both[..., ::2]) * both[..., 1::2])  # type: ignore[no-any-return]

    check(Fused(True), counted, {"swiglu": 1})
    check(Fused(False), counted, {"swiglu": 1})
    check(Interleaved(True), counted, {})


def test_dropped_residual_sums(counted: Counted) -> None:
    class Output(nn.Module):
        def __init__(self, extra: bool = False, first: bool = False) -> None:
            super().__init__()
            self.dense, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.3)
            self.extra, self.first = extra, first

        def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            dropped = self.dropout(self.dense(hidden))
            total = residual + dropped if self.first else dropped + residual
            return self.norm(total) + dropped if self.extra else self.norm(total)  # type: ignore[no-any-return]

    inputs = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8, requires_grad=True)
    check(Output(), counted, {"bias_dropout_residual": 1, "layer_norm": 1}, *inputs)
    check(Output(first=True), counted, {"bias_dropout_residual": 1, "layer_norm": 1}, *inputs)
    check(Output(extra=True), counted, {"layer_norm": 1}, *inputs)


def test_the_order_of_random_numbers_stays(counted: Counted) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            first = self.b(self.a(x))
            second = self.d(self.c(x))
            return self.a(first + residual) + second  # type: ignore[no-any-return]

    check(Two(), counted, {}, torch.randn(2, 3, 8), torch.randn(2, 3, 8))


class Rms(nn.Module):
    """A norm, of as many kinds as its arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.eps, self.kind = nn.Parameter(torch.randn(8)), 1e-4, kind

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        wide = x.float()
        if self.kind == "sum":
            return self.weight * x * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + self.eps)
        if self.kind == "outside":
            return self.weight * x / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
        if self.kind == "other epsilon":
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 2 * self.eps)).to(x.dtype)
        if self.kind == "all dimensions":
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean() + self.eps)).to(x.dtype)
        if self.kind == "detached":
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps).detach()).to(x.dtype)
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "1 + weight":
            return (normal * (1 + self.weight.float())).to(x.dtype)
        return self.weight * normal.to(x.dtype)


@pytest.mark.parametrize("kind", ["input", "1 + weight"])
def test_norms(kind: str, counted: Counted) -> None:
    class Named(Rms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    check(Named(kind), counted, {"rms_norm": 1})


@pytest.mark.parametrize("kind", ["sum", "outside", "other epsilon", "all dimensions", "detached"])
def test_almost_norms(kind: str, counted: Counted) -> None:
    class Named(Rms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    check(Named(kind), counted, {})


def test_correctness_18_arguments_by_name_and_by_default(counted: Counted) -> None:
    """Correctness 18."""

    class Scaled(Plain):
        def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(hidden) * scale

    plain = Plain(nn.GELU()).eval()
    model, x = nn.ModuleDict({"plain": plain, "scaled": Scaled(nn.GELU()).eval()}), torch.randn(3, 8)
    expected = plain(x), model["scaled"](x, scale=2.0)
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule.use_kernels(force=COUNTED)
    assert torch.equal(schedule["plain"].mod(hidden=x), expected[0])
    assert counted.calls == {"bias_act": 1}
    assert torch.equal(schedule["scaled"].mod(x, scale=2.0), expected[1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        schedule["plain"].mod(x=x)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        schedule["plain"].mod()


def test_one_of_those_that_are_alike_is_looked_at(counted: Counted) -> None:
    model = nn.Sequential(*(Plain(nn.GELU()) for _ in range(3)), Plain(nn.ReLU()))
    model[1].act = nn.GELU("tanh")
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule.use_kernels("bias_act", force=COUNTED)
    kinds = [schedule[path].mod._slapo_kernels.steps[0].activation for path in "0123"]  # type: ignore[union-attr]
    assert kinds == ["gelu", "gelu_tanh", "gelu", "relu"]


def test_parts_that_change_later_are_seen(counted: Counted) -> None:
    """A hook on a child, or its replacement, prevents a kernel from doing the child's work."""
    model = nn.Sequential(Plain(nn.GELU()).eval())
    schedule, x, seen = create_schedule(model, plugins=counted.plugins), torch.randn(3, 8), list[int]()
    schedule.use_kernels("bias_act", force=COUNTED)
    handle = model[0].act.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr]
    model(x)
    assert seen
    assert not counted.calls
    handle.remove()
    model(x)
    assert counted.calls == {"bias_act": 1}
    expected = model[0].fc2(F.relu(model[0].fc1(x)))  # type: ignore[union-attr, operator]
    schedule["0.act"].replace(nn.ReLU())
    assert torch.equal(model(x), expected)
    schedule["0.fc1"].mod.register_forward_hook(lambda module, args, result: result * 0)
    assert torch.equal(model(x), model[0].fc2(torch.zeros(3, 96)))  # type: ignore[union-attr, operator]


def test_hooked_modules(counted: Counted) -> None:
    model = nn.Sequential(Plain(nn.GELU()), Plain(nn.GELU()), nn.LayerNorm(8))
    model[0].act.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    schedule = create_schedule(model, plugins=counted.plugins)
    with pytest.raises(ScheduleError, match=r"use_kernels\(''\): '0.act' has a hook or wrapper that a kernel would bypass"):
        schedule.use_kernels("bias_act")
    assert type(model[1]) is Plain
    schedule.use_kernels()
    assert schedule.metadata.primitives["use_kernels"] == {"bias_act": ("1",), "layer_norm": ("2",)}
    assert type(model[0]) is Plain


@pytest.mark.parametrize(
    ("names", "force", "message"),
    [
        ("rms_nrom", None, "no kernel 'rms_nrom'; did you mean 'rms_norm'?"),
        ("swiglu", None, "nothing from here down computes 'swiglu'"),
        (["layer_norm", "rotary"], None, "nothing from here down computes 'rotary'"),
        ([], None, "the list of kernels is empty"),
        ("layer_norm", {"layer_norm": "liger"}, "implementation 'liger' of kernel 'layer_norm' works on"),
        ("layer_norm", {"layer_norm": "fast"}, "no implementation 'fast' of kernel 'layer_norm'"),
        ("layer_norm", {"layernorm": "eager"}, "no kernel 'layernorm'; did you mean 'layer_norm'?"),
        ("layer_norm", {"*": "fast"}, "none of the kernels has the implementation 'fast'"),
    ],
)
def test_refusals(names: Any, force: Any, message: str, counted: Counted) -> None:
    model = nn.Sequential(nn.LayerNorm(8), Plain(nn.GELU()))
    kinds = [type(module) for module in model.modules()]
    schedule = create_schedule(model, plugins=counted.plugins)
    with pytest.raises(ScheduleError, match=message.replace("?", r"\?").replace("*", r"\*")):
        schedule.use_kernels(names, force)
    assert [type(module) for module in model.modules()] == kinds
    assert not schedule.journal.steps


def test_what_is_served_already(counted: Counted) -> None:
    schedule = create_schedule(nn.Sequential(nn.LayerNorm(8)), plugins=counted.plugins)
    schedule.use_kernels("layer_norm")
    with pytest.raises(ScheduleError, match="nothing from here down computes 'layer_norm', or all that does is served already"):
        schedule.use_kernels("layer_norm")


def test_hooks_and_wrappers_of_the_module_itself_stay(counted: Counted) -> None:
    model, seen = nn.Sequential(Plain(nn.GELU()), nn.LayerNorm(8)), list[str]()
    for name, module in model.named_children():
        module.register_forward_hook(lambda module, args, result, name=name: seen.append(name))
    schedule, x = create_schedule(model, plugins=counted.plugins), torch.randn(3, 8, requires_grad=True)
    schedule["0"].checkpoint()
    before = copy.deepcopy(model)
    schedule.use_kernels(force=COUNTED)
    assert_equivalent(before, model, x)
    assert counted.calls == {"bias_act": 2, "layer_norm": 1}
    seen.clear()
    model(x)
    assert seen == ["0", "1"]


def test_a_forward_of_its_own_is_not_passed_by(counted: Counted) -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    model[0].forward = lambda x: x + 1  # type: ignore[method-assign]
    schedule = create_schedule(model, plugins=counted.plugins)
    with pytest.raises(ScheduleError, match="'0' has a hook or wrapper that a kernel would bypass"):
        schedule.use_kernels("layer_norm")
    schedule.use_kernels()
    assert torch.equal(model(torch.zeros(8)), torch.ones(8))
