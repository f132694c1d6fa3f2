"""Private names of torch that the runs of stages use; a test fails when torch moves one."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

VALUE_READS = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of a fake tensor whose values are read: by ``item()``, or by an operator whose result has a shape that they decide."""


def fake_store() -> Any:
    """Return the store of a process group whose other ranks do not exist, for the backend ``"fake"``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  registers the backend

    return FakeStore()


def backward_of_inputs(outputs: Any, gradients: Any, received: Any, weights: Any) -> list[dict[str, Any]]:
    """Run the first part of a pipeline's split backward; return what the second part needs."""
    from torch.distributed.pipelining._backward import stage_backward_input  # noqa: PLC0415  its import costs a second

    return stage_backward_input(outputs, gradients, received, iter(weights))[1]


def backward_of_weights(weights: Any, groups: list[dict[str, Any]]) -> None:
    """Run the second part of a pipeline's split backward."""
    from torch.distributed.pipelining._backward import stage_backward_weight  # noqa: PLC0415

    stage_backward_weight(iter(weights), groups)
