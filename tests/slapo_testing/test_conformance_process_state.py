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
from torch.nn import functional as F

from slapo_core import Primitive, Schedule, hookimpl, successor
from slapo_testing.conformance import ConformanceError, Example, primitive_checks
from slapo_testing.conformance.state_checks.process_state import SETTINGS
from slapo_tracing.nodes import wrap_forward

HERE = __name__
X = torch.linspace(-1, 1, 8).view(2, 4)
Wrapper = Callable[..., torch.Tensor]


class Model(nn.Sequential):
    """Reads a number of this module."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * SCALE[0]


SCALE = [1.0]
HANDLES: list[Any] = []
WEIGHTS: dict[tuple[int, ...], torch.Tensor] = {}


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


def detached(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    return call(x.detach())


def as_if_contiguous(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    return call(x.as_strided(x.shape, torch.empty(x.shape).stride()))


def raises_unless_contiguous(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise TypeError("what is this")
    return call(x)


def draws(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    torch.rand(1)
    return call(x)


class LaterInTraining(nn.Linear):
    """Is right once in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls = self.__dict__["calls"] = self.__dict__.get("calls", 0) + self.training
        return super().forward(x) * (1.1 if self.training and calls > 1 else 1.0)


class Stale(nn.Linear):
    """Has the weight of its first forward for ever, and the gradient of now."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.__dict__.setdefault("first", self.weight.detach().clone())
        return F.linear(x, first + (self.weight - self.weight.detach()), self.bias)


class StaleWithoutGradients(nn.Linear):
    """Has the weight of its first forward for ever where no gradients are recorded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.__dict__.setdefault("first", self.weight.detach().clone())
        return F.linear(x, self.weight if torch.is_grad_enabled() else first, self.bias)


class Merging(nn.Linear):
    """Is merged by ``eval()``, and stays so."""

    def train(self, mode: bool = True) -> Merging:
        self.scale = 1.1 if self.training and not mode else self.__dict__.get("scale", 1.0)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.__dict__.get("scale", 1.0)


def of_another_model(module: nn.Module) -> None:
    kept = WEIGHTS.setdefault(tuple(module.weight.shape), module.weight.detach().clone())
    module.weight = successor(module.weight, kept.clone())


def first_gradient_alone(module: nn.Module) -> None:
    weight = module.weight
    weight.register_hook(lambda gradient: gradient if weight.grad is None else gradient * 0)


def without_dropout(module: nn.Module) -> None:
    if not module.training:
        module.__class__ = nn.Identity


def spoils_the_inputs(schedule: Schedule) -> None:
    schedule.example_inputs[0].detach().zero_()


WRAPPERS: dict[str, Callable[[], Any]] = {
    "later": Later,
    "without_gradients": lambda: without_gradients,
    "in_half": lambda: in_half,
    "under_autocast": lambda: under_autocast,
    "another_type": lambda: another_type,
    "raises_under_autocast": lambda: raises_under_autocast,
    "raises_in_half": lambda: raises_in_half,
    "detached": lambda: detached,
    "as_if_contiguous": lambda: as_if_contiguous,
    "raises_unless_contiguous": lambda: raises_unless_contiguous,
    "draws": lambda: draws,
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
    "method": lambda module: setattr(nn.Linear, "forward", lambda self, x: x),
    "function": lambda module: setattr(F, "gelu", lambda x, approximate="none": x),
    "global_hook": lambda module: HANDLES.append(nn.modules.module.register_module_forward_hook(lambda *_: None)),
    "global_number": lambda module: SCALE.__setitem__(0, SCALE[0] * 2),
    "of_another_model": of_another_model,
    "first_gradient_alone": first_gradient_alone,
    "without_dropout": without_dropout,
    "later_in_training": lambda module: setattr(module, "__class__", LaterInTraining),
    "stale": lambda module: setattr(module, "__class__", Stale),
    "stale_without_gradients": lambda module: setattr(module, "__class__", StaleWithoutGradients),
    "merging": lambda module: setattr(module, "__class__", Merging),
}


def made(name: str, apply: Callable[[Schedule], Any]) -> type[Primitive]:
    body = {"name": name, "scope": "subtree", "__doc__": "Is broken.", "apply": staticmethod(apply), "__module__": HERE}
    return type(name, (Primitive,), body)


PLANTED = {
    **{name: made(name, lambda sch, new=new: wrap_forward(sch.mod, new())) for name, new in WRAPPERS.items()},  # type: ignore[misc]
    **{name: made(name, lambda sch, change=change: change(sch.mod)) for name, change in CHANGES.items()},  # type: ignore[misc]
    "spoils_the_inputs": made("spoils_the_inputs", spoils_the_inputs),
}


@hookimpl
def slapo_primitives() -> dict[str, Any]:
    return PLANTED


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    before, functions = {what: read() for what, (read, _) in SETTINGS.items()}, (nn.Linear.forward, F.gelu)
    yield
    SCALE[0] = 1.0
    WEIGHTS.clear()
    nn.Linear.forward, F.gelu = functions
    while HANDLES:
        HANDLES.pop().remove()
    for what, (_, put) in SETTINGS.items():
        put(before[what])


def failing(name: str, *checks: str, path: str = "2") -> dict[str, str]:
    found = {}
    for check in primitive_checks(name, [Example(Model, (X,), path, plugins=(HERE,))]):
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
    ("name", "path", "sentence"),
    [
        ("method", "2", "beside the unmodified model, in evaluation: output: 8 of 8"),
        ("global_number", "2", "beside the unmodified model, in evaluation: output: 8 of 8"),
        ("detached", "0", "gradient of input[0]: expected a float32 tensor of shape (2, 4) on cpu, found nothing"),
        ("first_gradient_alone", "2", "with gradients accumulated, beside the unmodified model, in evaluation: gradient"),
        ("as_if_contiguous", "0", "with inputs that are not contiguous, beside the unmodified model, in evaluation: output"),
        ("raises_unless_contiguous", "0", "with inputs that are not contiguous, the model raises TypeError, as no other does"),
        ("draws", "2", "beside the unmodified model: the forward draws random numbers, which that does not"),
        ("later_in_training", "2", "the second time, beside the unmodified model, in training: output"),
        ("merging", "2", "after evaluation and training, beside the unmodified model, in evaluation: output"),
        ("without_dropout", "3", "after evaluation, beside the unmodified model, in training: output"),
        ("stale", "2", "after a step of SGD, beside the unmodified model, in evaluation: output"),
        ("stale_without_gradients", "2", "after a step of SGD, without gradients, beside the unmodified model, in evaluation"),
        ("of_another_model", "2", "a model of another seed beside the unmodified model, in evaluation: output"),
    ],
)
def test_a_fault_that_one_run_of_one_model_does_not_show_is_caught(name: str, path: str, sentence: str) -> None:
    assert sentence in failing(name, "numerics", path=path)["numerics"]


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
        ("method", "the step changes for the whole process torch.nn.modules.linear.Linear.forward"),
        ("function", "the step changes for the whole process torch.nn.functional.gelu"),
        ("global_hook", "the hooks of all modules, torch.nn.modules.module._global_forward_hooks"),
        ("global_number", "after the step a model without it computes another thing, in evaluation: output: 8 of 8"),
        ("spoils_the_inputs", "the step changes the example inputs"),
    ],
)
def test_what_a_step_does_to_the_process_is_caught_and_put_back(name: str, said: str) -> None:
    def now() -> list[Any]:
        hooks = dict(nn.modules.module._global_forward_hooks)
        return [*(read() for read, _ in SETTINGS.values()), nn.Linear.forward, F.gelu, hooks]

    before = now()
    found = failing(name, "process")
    assert now() == before
    assert said in found["process"] if said else not found
