"""The conformance kit: faults that show under some circumstances alone, and what a step does to the process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from slapo_core import Primitive, Schedule, hookimpl
from slapo_core.testing.conformance import ConformanceError, Example, primitive_checks
from slapo_core.testing.conformance.process_state import SETTINGS
from slapo_core.wrapping import wrap_forward

HERE = __name__
X = torch.linspace(-1, 1, 8).view(2, 4)
Wrapper = Callable[..., torch.Tensor]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Later:
    """Is right once."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Wrapper, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return call(x) if self.calls == 1 else call(x) * 1.1


def without_gradients(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    return call(x) if torch.is_grad_enabled() else call(x) * 1.1


def in_half(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    return call(x) * 1.2 if x.dtype is torch.bfloat16 and not torch.is_autocast_enabled("cpu") else call(x)


def under_autocast(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    return call(x) * 1.2 if torch.is_autocast_enabled("cpu") else call(x)


def another_type(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    if not torch.is_autocast_enabled("cpu"):
        return call(x)
    with torch.autocast("cpu", enabled=False):
        return call(x.float())


def raises_under_autocast(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        raise TypeError("what is this")
    return call(x)


def raises_in_half(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    return call(x.float() if x.dtype is torch.bfloat16 and not torch.is_autocast_enabled("cpu") else x)


WRAPPERS: dict[str, Callable[[], Any]] = {
    "later": Later,
    "without_gradients": lambda: without_gradients,
    "in_half": lambda: in_half,
    "under_autocast": lambda: under_autocast,
    "another_type": lambda: another_type,
    "raises_under_autocast": lambda: raises_under_autocast,
    "raises_in_half": lambda: raises_in_half,
}
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda module: None,
    "dtype": lambda module: torch.set_default_dtype(torch.float64),
    "device": lambda module: torch.set_default_device("meta"),
    "gradients": lambda module: torch.set_grad_enabled(False),
    "deterministic": lambda module: torch.use_deterministic_algorithms(True),
    "matmul": lambda module: torch.set_float32_matmul_precision("medium"),
    "threads": lambda module: torch.set_num_threads(torch.get_num_threads() + 1),
    "folder": lambda module: os.chdir("/"),
    "torch_random": lambda module: torch.manual_seed(5),
    "python_random": lambda module: random.random(),
    "numpy_random": lambda module: numpy.random.rand(),
    "gradient": lambda module: setattr(module.weight, "grad", torch.zeros(4, 4)),
}


def made(name: str, apply: Callable[[Schedule], Any]) -> type[Primitive]:
    body = {"name": name, "scope": "subtree", "__doc__": "Is broken.", "apply": staticmethod(apply), "__module__": HERE}
    return type(name, (Primitive,), body)


PLANTED = {
    **{name: made(name, lambda sch, new=new: wrap_forward(sch.mod, new())) for name, new in WRAPPERS.items()},  # type: ignore[misc]
    **{name: made(name, lambda sch, change=change: change(sch.mod)) for name, change in CHANGES.items()},  # type: ignore[misc]
}


@hookimpl
def slapo_primitives() -> dict[str, Any]:
    return PLANTED


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    before = {what: read() for what, (read, _) in SETTINGS.items()}
    yield
    for what, (_, put) in SETTINGS.items():
        put(before[what])


def failing(name: str, *checks: str) -> dict[str, str]:
    found = {}
    for check in primitive_checks(name, [Example(model, (X,), "2", plugins=(HERE,))]):
        if check.name in checks:
            try:
                check()
            except ConformanceError as error:
                found[check.name] = str(error)
    return found


@pytest.mark.parametrize(
    ("name", "check", "sentence"),
    [
        ("later", "numerics", "the second time, beside the unmodified model, in evaluation: output: 8 of 8 elements"),
        ("without_gradients", "numerics", "without gradients, beside the unmodified model, in evaluation: output: 8 of 8"),
        ("in_half", "bfloat16", "in bfloat16: "),
        ("under_autocast", "autocast", "under autocast: "),
        ("another_type", "autocast", "under autocast: "),
        ("raises_under_autocast", "autocast", "under autocast the model raises TypeError: what is this"),
        ("raises_in_half", "bfloat16", "in bfloat16 the model raises RuntimeError: "),
    ],
)
def test_a_fault_of_some_circumstance_is_caught(name: str, check: str, sentence: str) -> None:
    found = failing(name, "numerics", "autocast", "bfloat16")
    assert {*found} == {check}
    assert sentence in found[check]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", ""),
        ("dtype", "the step changes for the whole process the default dtype"),
        ("device", "the step changes for the whole process the default device"),
        ("gradients", "the step changes for the whole process whether gradients are recorded"),
        ("deterministic", "the step changes for the whole process whether algorithms are deterministic"),
        ("matmul", "the step changes for the whole process the precision of matrix products"),
        ("threads", "the step changes for the whole process the number of threads"),
        ("folder", "the step changes for the whole process the working directory"),
        ("torch_random", "the step changes for the whole process the random state of torch"),
        ("python_random", "the step changes for the whole process the random state of Python"),
        ("numpy_random", "the step changes for the whole process the random state of NumPy"),
        ("gradient", "the step leaves a gradient in '2.weight'"),
    ],
)
def test_what_a_step_does_to_the_process_is_caught_and_put_back(name: str, said: str) -> None:
    before = {what: read() for what, (read, _) in SETTINGS.items()}
    found = failing(name, "process")
    assert {what: read() for what, (read, _) in SETTINGS.items()} == before
    assert said in found["process"] if said else not found
