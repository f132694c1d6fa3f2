"""What a step leaves of the process: nobody who schedules a model expects another random state or default type."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slapo_core import RNGState, Schedule, parameter_facts, rng_state, set_rng_state
from slapo_verify.comparison import Run

from ..examples.argument_copies import own, same
from ..examples.case import Case, ConformanceError
from .patched_functions import Patches


def _set_default_device(device: torch.device) -> None:
    """Set the default device; for the CPU without a mode, which would stay on the stack of function modes."""
    torch.set_default_device(None if device == torch.device("cpu") else device)


SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, _set_default_device),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "whether algorithms are deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "the precision of matrix products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the working directory": (os.getcwd, os.chdir),
}
"""How each is read and set."""
_TORCHS = "the random state of torch"


def process(case: Case) -> None:
    """A step leaves settings, functions and random states of the process as they were, no gradients, and the example inputs.

    What it found is put back, whatever the step has made of it.
    """
    wanted = _unmodified(case)
    schedule = case.begin()
    inputs = own(schedule.example_inputs, clone=True)
    _leaves_the_process(case, schedule)
    if not same(schedule.example_inputs, inputs):
        raise ConformanceError("the step changes the example inputs")
    if kept := [name for name, tensor in schedule.mod.named_parameters() if tensor.grad is not None]:
        raise ConformanceError(f"the step leaves a gradient in {kept[0]!r}")
    if case.example.numerics != "none":
        what = "after the step a model without it computes another thing"
        replace(case, training=False).same(wanted, _unmodified(case), what)


def _unmodified(case: Case) -> Run:
    """What a model without the step computes."""
    quiet = replace(case, training=False)
    model = quiet.model()
    torch.manual_seed(2)
    return quiet.run(model)


def _leaves_the_process(case: Case, schedule: Schedule) -> None:
    settings, state = {what: read() for what, (read, _) in SETTINGS.items()}, _Random()
    patches, brought = Patches(schedule.mod), _brought(schedule.mod)
    try:
        case.step(schedule, seeded=False)
        changed = [what for what, (read, _) in SETTINGS.items() if read() != settings[what]]
        changed += patches.differences()
        drawn = [] if "values" in case.example.changes else state.differences()
    finally:
        for what, (read, put) in SETTINGS.items():
            if read() != settings[what]:
                put(settings[what])
        state.put_back()
        patches.put_back()
    if _brought(schedule.mod) > brought:  # new parameters start at random
        drawn = [what for what in drawn if what != _TORCHS]
    if changed or drawn:
        more = "; make modules whose parameters are replaced by torch.nn.utils.skip_init" if _TORCHS in drawn else ""
        raise ConformanceError(f"the step changes for the whole process {' and '.join([*changed, *drawn])}{more}")


def _brought(model: nn.Module) -> int:
    """How many parameters the unmodified model does not have."""
    return sum(not parameter_facts(parameter).names for parameter in model.parameters())


class _Random:
    """The random states of now."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = rng_state(), random.getstate(), _numpy()

    def differences(self) -> list[str]:
        """Whose are others now."""
        now = _Random()
        pairs = {
            _TORCHS: (_plain(self._torch), _plain(now._torch)),
            "the random state of Python": (self._python, now._python),
            "the random state of NumPy": (self._numpy and self._numpy[1], now._numpy and now._numpy[1]),
        }
        return [name for name, (before, after) in pairs.items() if before != after]

    def put_back(self) -> None:
        """Make them those again."""
        set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy[0])


def _plain(state: RNGState) -> Any:
    def of(devices: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
        return {device: tensor.tolist() for device, tensor in devices.items()}

    return of(state.devices), {name: of(devices) for name, devices in state.tracked.items()}


def _numpy() -> Any:
    """The state, and the same as plain numbers; None where NumPy is not loaded."""
    loaded: Any = sys.modules.get("numpy")
    if loaded is None:
        return None
    state = loaded.random.get_state()
    return state, (state[1].tolist(), *state[2:])
