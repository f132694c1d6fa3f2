"""GELU by the error function in what inductor compiles for a CPU: its value, its gradient, and what is kept between the two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from transformers.activations import GELUActivation

from slapo_core import create_schedule
from slapo_fusion import _torch_inductor_pass, cpu_operators
from slapo_fusion.compilers import inductor
from slapo_fusion.cpu_operators import gelu, gelu_formula
from slapo_tracing.matching.patterns import call_module
from slapo_verify.comparison import assert_equivalent

X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A bias and a GELU, as a function or as a layer."""

    def __init__(self, act: nn.Module | None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.bias
        return F.gelu(y) if self.act is None else self.act(y)


def of_function(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


def of_layer(x: Any, bias: Any) -> Any:
    return call_module("act", x + bias)


def fused(before: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    sch = create_schedule(copy.deepcopy(before), example_inputs=inputs).trace()
    sch.fuse(sch.find(of_function if before.act is None else of_layer))
    return sch.mod


ACTS = {"function": None, "layer": nn.GELU(), "tanh": nn.GELU(approximate="tanh"), "Transformers": GELUActivation()}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The operations of each graph that the compiler makes of these regions: of the forward, then of the backward."""
    found: list[list[str]] = []
    inner = _torch_inductor_pass._replace_row_sums

    def seen(graph: Any) -> None:
        inner(graph)
        found.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

    monkeypatch.setattr(_torch_inductor_pass, "_replace_row_sums", seen)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no pass runs for what is there already
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("act", ACTS)
def test_a_fused_chain_is_the_unmodified_ones_numbers_and_gradients(act: str, made: list[list[str]]) -> None:
    before = Model(ACTS[act])
    assert_equivalent(before, fused(before, X), X)
    assert [each.count("aten.exp.default") for each in made] == [act != "tanh", 0]
    assert [each.count("slapo.sum.default") for each in made] == [0, 1], "the gradient of the bias is torch's own sum"
    assert not any("erf" in each or "gelu" in each for each in sum(made, []))


def test_values_and_derivatives_are_as_near_to_the_truth_as_torchs() -> None:
    z = torch.linspace(-20, 20, 200001)
    exact = z.double()
    density = torch.exp(-0.5 * exact.square())
    below = 0.5 * torch.special.erfcx(exact.abs() / 2**0.5) * density
    below = torch.where(exact > 0, 1 - below, below)
    for found, torchs, truth in zip(
        gelu_formula(z), _both(F.gelu, z), (exact * below, below + exact * density / (2 * torch.pi) ** 0.5), strict=True
    ):
        errors = [(each.double() - truth).abs() for each in (found, torchs)]
        assert errors[0].max() <= 1.2 * errors[1].max()
        far = (z > -13) & (z < -3)
        assert errors[0][far].max() <= errors[1][far].max()
    values, shown = gelu_formula(z)[0].double(), (z > -13) & (z != 0)
    relative = ((values - exact * below).abs() / (exact * below).abs())[shown]
    assert relative.max() < 2e-5, "as far as exp() of the rounded square goes; nothing is left of torch's there"


def _both(function: Any, z: torch.Tensor) -> list[torch.Tensor]:
    z = z.clone().requires_grad_()
    y = function(z)
    return [y.detach(), *torch.autograd.grad(y.sum(), z)]


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # said whichever flag is set
def test_infinities_and_what_is_no_number_are_torchs() -> None:
    """Without oneDNN, whose GELU of infinity is NaN on some processors and infinity on others."""
    z = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e30, -1e30, 1e-40])
    with torch.backends.mkldnn.flags(enabled=False):
        expected = _both(F.gelu, z)
    for found, torchs in zip(gelu_formula(z), expected, strict=True):
        torch.testing.assert_close(found, torchs, equal_nan=True, rtol=1e-6, atol=0)


def test_other_numbers_and_what_is_more_than_a_tensor_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(args)

    class Marked(torch.Tensor):
        pass

    monkeypatch.setattr(cpu_operators, "_gelu", refuse)
    torch.testing.assert_close(gelu(X), F.gelu(X), msg="nothing is compiled")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(AssertionError):
        gelu(X)
    for x in (X.double(), X.bfloat16(), X.to("meta"), X.as_subclass(Marked)):
        assert type(gelu(x)) is type(x)
    assert torch.equal(gelu(X, "tanh"), F.gelu(X, approximate="tanh"))


def _kept(run: Any, x: torch.Tensor) -> list[tuple[Any, ...]]:
    """Shape and dtype of what autograd keeps of a forward, the inputs and parameters left out."""
    kept: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.setdefault(id(each), each), lambda each: each):
        run(x)
    return [(tuple(each.shape), each.dtype) for each in kept.values() if not each.is_leaf or not each.requires_grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_is_kept_for_the_backward_than_eager_torch_keeps(dtype: torch.dtype) -> None:
    before, x = Model(None).to(dtype), X.clone().to(dtype).requires_grad_()
    assert len(_kept(before, x)) == 1, "the sum"
    after = fused(before, x)
    assert len(_kept(after, x)) <= 1
    torch.testing.assert_close(after(x), before(x), rtol=0.05, atol=1e-3)


def test_sums_over_all_or_some_dimensions_are_computed() -> None:
    def written(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.gelu(x)
        return y.sum(dim=None, keepdim=True), y.sum(), y.sum(0), y.sum((0, 1), keepdim=True), y.sum(-1), y.sum((0, 2))

    for found, expected in zip(inductor(fx.symbolic_trace(written))(X), written(X), strict=True):
        torch.testing.assert_close(found, expected)


def test_torch_knows_both_operations() -> None:
    torch.library.opcheck(cpu_operators._gelu, (X.clone().requires_grad_(),))
    torch.library.opcheck(_torch_inductor_pass._sum, (X, [0, 1], True), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(
        _torch_inductor_pass._sum, (X.transpose(0, 1), [0], False), test_utils=("test_schema", "test_faketensor")
    )


def test_it_runs_without_gradients() -> None:
    before = Model(ACTS["layer"])
    with torch.no_grad():
        after = fused(before, X)
        torch.testing.assert_close(after(X), before(X))


@pytest.mark.slow
def test_rows_of_any_number_are_compiled_once() -> None:
    def written(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + bias)

    bias = torch.randn(8, requires_grad=True)
    region = inductor(fx.symbolic_trace(written))
    for rows in (3, 5, 7):
        x = torch.randn(rows, 8, requires_grad=True)
        for found, expected in zip(_step(region, x, bias), _step(written, x, bias), strict=True):
            torch.testing.assert_close(found, expected)


def _step(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]
