"""Layer norms that stay whole in what inductor compiles for a CPU: torch's numbers and gradients, whatever is given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import create_schedule
from slapo_fusion import cpu_operators
from slapo_fusion.cpu_operators import call_norm, layer_norm
from slapo_tracing.matching.patterns import call_module
from slapo_verify.comparison import assert_equivalent

X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A dropout, a sum and a norm, as a layer and as a function."""

    def __init__(self, affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=affine, bias=bias)
        if affine:
            nn.init.normal_(self.norm.weight)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = self.norm(residual + F.dropout(x, 0.1, True))
        return F.layer_norm(torch.tanh(y), (8,), self.scale)


def chain(x: Any, residual: Any, scale: Any) -> Any:
    y = call_module("norm", residual + F.dropout(x, 0.1, True))
    return F.layer_norm(torch.tanh(y), (8,), scale)


def options(affine: bool, bias: bool) -> Any:
    return pytest.param(affine, bias, id=f"affine={affine}-bias={bias}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("affine", "bias"), [options(True, True), options(True, False), options(False, False)])
def test_a_fused_chain_is_the_unmodified_ones_mask_numbers_and_gradients(
    affine: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Model(affine, bias)
    sch = create_schedule(copy.deepcopy(before), example_inputs=(X, X)).trace()
    sch.fuse(sch.find(chain))
    whole: list[Any] = []
    inner = cpu_operators._layer_norm
    monkeypatch.setattr(cpu_operators, "_layer_norm", lambda *args: whole.append(args) or inner(*args))
    assert_equivalent(before, sch.mod, X, 2 * X)
    assert len(whole) == 2, "the layer and the function, seen while it is compiled"


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
KINDS = [
    (dtypes, given)
    for dtypes in ((F32, F32), (F64, F64), (BF16, BF16), (BF16, F32))
    for given in ((1, 1), (1, 0), (0, 0), (0, 1))
]
KINDS.remove(((BF16, F32), (0, 1)))  # torch has no gradient for it


@pytest.mark.parametrize(("dtypes", "given"), KINDS)
@pytest.mark.parametrize("wants", [(True, True, True), (True, False, False), (False, True, True), (False, False, True)])
def test_it_is_torchs_to_the_bit(dtypes: Any, given: Any, wants: Any) -> None:
    results = []
    for norm in (F.layer_norm, layer_norm):
        generator = torch.Generator().manual_seed(0)
        shapes, kinds = ((3, 4, 8), (4, 8), (4, 8)), (dtypes[0], dtypes[1], dtypes[1])
        made = [torch.randn(shape, generator=generator, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
        asked = [each.requires_grad_(wanted) for each, wanted in zip(made, wants, strict=True)]
        x, weight, bias = (each if is_given else None for each, is_given in zip(asked, (True, *given), strict=True))
        y = norm(x.transpose(0, 0), (4, 8), weight, bias, 1e-3)
        if y.requires_grad:
            (y * torch.arange(8).to(y.dtype)).transpose(0, 1).sum(0).square().sum().backward()
        results.append([y.detach(), *(each.grad for each in asked)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_torch_knows_the_operation_and_its_gradient() -> None:
    weight, bias = (torch.randn(8, requires_grad=True) for _ in range(2))
    torch.library.opcheck(cpu_operators._layer_norm, (X.clone().requires_grad_(), [8], weight, bias, 1e-5))
    torch.library.opcheck(cpu_operators._layer_norm, (X.bfloat16(), [4, 8], None, None, 1e-5))
    mean = X.mean(-1, keepdim=True)
    arguments = (X, X, [8], mean, torch.ones_like(mean), weight.detach(), bias.detach(), [True, False, True])
    torch.library.opcheck(cpu_operators._layer_norm_backward, arguments)


def test_a_device_that_is_no_cpu_and_what_is_more_than_a_tensor_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(args)

    class Marked(torch.Tensor):
        pass

    monkeypatch.setattr(cpu_operators, "_layer_norm", refuse)
    assert layer_norm(X.to("meta"), (8,)).shape == X.shape
    assert type(layer_norm(X.as_subclass(Marked), (8,))) is Marked


def test_a_layer_is_called_as_it_is_unless_it_is_torchs_norm() -> None:
    class Doubled(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    norm, doubled = nn.LayerNorm(8), Doubled(8)
    torch.testing.assert_close(call_norm(doubled, X), 2 * norm(X))
    torch.testing.assert_close(call_norm(norm, input=X), norm(X))
    with pytest.raises(TypeError, match="positional argument"):
        call_norm(norm, X, X)


def test_under_autocast_it_is_what_torch_computes() -> None:
    norm = nn.LayerNorm(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x in (X, X.bfloat16()):
            expected, found = norm(x), call_norm(norm, x)
            assert found.dtype is expected.dtype
            assert torch.equal(found, expected)
