"""The conformance kit on kernels: a right implementation passes, and each planted fault is caught."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import slapo_kernels
import slapo_kernels.plugin
from slapo_core import hookimpl
from slapo_kernels import Implementation, eager
from slapo_testing import isolated_plugins
from slapo_testing.conformance import ConformanceError, KernelExample, check_kernel, kernel_checks

Tensor = torch.Tensor


class Swiglu(torch.autograd.Function):
    """Right forward and backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * F.silu(gate)


class WrongGradient(Swiglu):
    """The gradient of the gate is that of a sigmoid."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return grad * up * torch.sigmoid(gate), grad * F.silu(gate)


class OverwritesGradient(Swiglu):
    """The incoming gradient is used as memory."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = Swiglu.backward(ctx, grad.clone())
        grad.copy_(found[0])
        return found


class ReadsMemory(Swiglu):
    """The numbers are read in the order in which they lie in memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        strides = torch.empty(gate.shape).stride()
        return Swiglu.forward(ctx, *(each.as_strided(each.shape, strides) for each in (gate, up)))


class NeedsBoth(Swiglu):
    """The backward computes what only an input with a gradient has."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not all(ctx.needs_input_grad):
            return None, None
        return Swiglu.backward(ctx, grad)


def of(function: type[torch.autograd.Function]) -> Callable[[Tensor, Tensor], Tensor]:
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return function.apply(gate, up)

    return swiglu


def in_float32(gate: Tensor, up: Tensor) -> Tensor:
    return eager.swiglu(gate.float(), up.float())


def three_rows_alone(gate: Tensor, up: Tensor) -> Tensor:
    if gate.dim() != 2 or len(gate) != 3:
        raise RuntimeError("no launch configuration")
    return eager.swiglu(gate, up)


def all_but_three_rows(gate: Tensor, up: Tensor) -> str | None:
    return None if gate.dim() == 2 and len(gate) == 3 else f"takes three rows, not {list(gate.shape)}"


def other_masks(x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float, training: bool) -> Tensor:
    torch.rand(3)
    return eager.bias_dropout_residual(x, bias, residual, p=p, training=training)


def unscaled(x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float, training: bool) -> Tensor:
    kept = torch.rand_like(x) >= p if training else torch.ones(())
    return (x if bias is None else x + bias) * kept + residual


class Redraws(torch.autograd.Function):
    """Dropout whose backward drops other numbers than its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.p = p
        return F.dropout(x, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return F.dropout(grad, ctx.p), None


def redraws(x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float, training: bool) -> Tensor:
    x = x if bias is None else x + bias
    return (Redraws.apply(x, p) if training else x) + residual


@contextmanager
def registered(kernel: str, implementation: Any) -> Iterator[None]:
    """Register an implementation as ``"mine"``."""

    class Plugin:
        @hookimpl
        def slapo_kernels(self) -> dict[str, dict[str, Any]]:
            return {kernel: {"mine": implementation}}

    with isolated_plugins(slapo_kernels.plugin, Plugin()):
        slapo_kernels.reset()
        try:
            yield
        finally:
            slapo_kernels.reset()


def failures(kernel: str, implementation: Any, *examples: KernelExample) -> dict[str, str]:
    """Return the first message of each kind of check that fails."""
    found: dict[str, str] = {}
    with registered(kernel, implementation):
        for check in kernel_checks(kernel, "mine", examples):
            try:
                check()
            except ConformanceError as error:
                found.setdefault(check.name, str(error))
    return found


ROWS = torch.linspace(-2, 2, 48).view(3, 16)


def test_a_right_implementation_passes() -> None:
    with registered("swiglu", of(Swiglu)):
        check_kernel("swiglu", "mine", [KernelExample((ROWS, ROWS.flip(0)), name="three rows")])


@pytest.mark.parametrize(
    ("implementation", "check", "message"),
    [
        (
            of(WrongGradient),
            "values",
            r"in float32: gradient of 'gate': 160 of 160 elements differ; largest absolute er",
        ),
        (of(OverwritesGradient), "values", r"left of input, the gradient of the output: 160 of 160 elements differ"),
        (of(ReadsMemory), "strided", r"in float32, not contiguous: output: \d+ of 160 elements differ"),
        (of(NeedsBoth), "gradients", r"with a gradient of 'gate' alone: gradient of 'gate': 160 of 160 elements differ"),
        (in_float32, "values", r"in bfloat16: output: expected a bfloat16 tensor of shape .*, found a float32 tensor"),
        (three_rows_alone, "values", r"RuntimeError: no launch configuration; compute the call, or return the reason from ref"),
        (lambda up, gate: eager.swiglu(gate, up), "signature", r"swiglu\(gate: .*\) -> .*: 'up' takes the place of 'gate'"),
        (lambda gate: gate, "signature", "too many positional arguments"),
        (Implementation(eager.swiglu, refuses=lambda gate: None), "signature", "refuses is called as swiglu.* too many"),
        (Implementation(eager.swiglu, refuses=lambda gate, up: "is tired"), "some call", r"every call is refused; .*is tired"),
        (Implementation(eager.swiglu, devices=("cuda",)), "registered", "works on cuda, not on cpu"),
    ],
)
def test_a_wrong_implementation_is_caught(implementation: Any, check: str, message: str) -> None:
    found = failures("swiglu", implementation)
    assert check in found, found
    assert re.search(message, found[check])


def test_a_call_may_be_refused_for_a_reason() -> None:
    limited = Implementation(three_rows_alone, refuses=all_but_three_rows)
    assert failures("swiglu", limited, KernelExample((ROWS[0], ROWS[1]), refused="takes three rows")) == {}
    found = failures("swiglu", limited, KernelExample((ROWS[0], ROWS[1]), name="one row"))
    assert "one row: in float32: the call is refused with \"implementation 'mine'" in found["values"]
    found = failures("swiglu", limited, KernelExample((ROWS, ROWS), refused="takes no rows"))
    assert "the call is computed; it should be refused with 'takes no rows'" in found["values"]
    found = failures("swiglu", limited, KernelExample((ROWS[0], ROWS[1]), refused="takes no rows"))
    assert "takes three rows, not [16]', not with 'takes no rows'" in found["values"].replace('"', "'")


def test_defaults_are_those_of_the_eager_implementation() -> None:
    def geglu(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
        return eager.geglu(gate, up, approximate=approximate)

    assert "'approximate' is 'tanh' by default" in failures("geglu", geglu)["signature"]


def test_random_numbers_may_be_others_but_not_their_means() -> None:
    assert failures("bias_dropout_residual", other_masks) == {}
    assert "the mean of the output over 200 seeds is" in failures("bias_dropout_residual", unscaled)["values"]
    assert "the mean of the gradient of 'x' over 200 seeds is" in failures("bias_dropout_residual", redraws)["values"]


def test_an_implementation_that_nobody_registers() -> None:
    with pytest.raises(ConformanceError, match="no implementation 'mine'"):
        check_kernel("swiglu", "mine")
