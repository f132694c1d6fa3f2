"""Check of process-wide state: a step must not change random states, defaults or functions."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from slapo_core import RNGState, Schedule, parameter_facts, rng_state, set_rng_state
from slapo_verify.comparison import Run

from ..examples.case import Case, ConformanceError
from ..examples.model_snapshot import copy_containers, is_unchanged
from ._torch_private import hooks_of_all_modules


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
"""Setting to the functions that read and set it."""
_TORCH_STATE = "the random state of torch"


def process(case: Case) -> None:
    """Check that a step changes no setting, function or random state of the process, no gradient, and no example input.

    Changed state is restored in any case.
    """
    wanted = _run_unmodified(case)
    schedule = case.begin()
    inputs = copy_containers(schedule.example_inputs, clone=True)
    _check_process(case, schedule)
    if not is_unchanged(schedule.example_inputs, inputs):
        raise ConformanceError("the step changes the example inputs")
    if kept := [name for name, tensor in schedule.mod.named_parameters() if tensor.grad is not None]:
        raise ConformanceError(f"the step leaves a gradient in {kept[0]!r}")
    if case.example.numerics != "none":
        what = "after the step a model without it computes another thing"
        replace(case, training=False).same(wanted, _run_unmodified(case), what)


def _run_unmodified(case: Case) -> Run:
    """Return the results of a model without the step."""
    quiet = replace(case, training=False)
    model = quiet.model()
    torch.manual_seed(2)
    return quiet.run(model)


def _check_process(case: Case, schedule: Schedule) -> None:
    settings, state = {what: read() for what, (read, _) in SETTINGS.items()}, _RandomStates()
    patches, brought = Patches(schedule.mod), _num_new_parameters(schedule.mod)
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
    if _num_new_parameters(schedule.mod) > brought:  # new parameters start at random
        drawn = [what for what in drawn if what != _TORCH_STATE]
    if changed or drawn:
        more = "; make modules whose parameters are replaced by torch.nn.utils.skip_init" if _TORCH_STATE in drawn else ""
        raise ConformanceError(f"the step changes for the whole process {' and '.join([*changed, *drawn])}{more}")


def _num_new_parameters(model: nn.Module) -> int:
    """Return the number of parameters that the unmodified model does not have."""
    return sum(not parameter_facts(parameter).names for parameter in model.parameters())


class _RandomStates:
    """Present random states."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = rng_state(), random.getstate(), _numpy()

    def differences(self) -> list[str]:
        """Return the names of the random states that have changed."""
        now = _RandomStates()
        pairs = {
            _TORCH_STATE: (_state_lists(self._torch), _state_lists(now._torch)),
            "the random state of Python": (self._python, now._python),
            "the random state of NumPy": (self._numpy and self._numpy[1], now._numpy and now._numpy[1]),
        }
        return [name for name, (before, after) in pairs.items() if before != after]

    def put_back(self) -> None:
        """Restore the random states."""
        set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy[0])


def _state_lists(state: RNGState) -> Any:
    def of(devices: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
        return {device: tensor.tolist() for device, tensor in devices.items()}

    return of(state.devices), {name: of(devices) for name, devices in state.tracked.items()}


def _numpy() -> Any:
    """Return NumPy's random state, also as plain numbers; None if NumPy is not imported."""
    loaded: Any = sys.modules.get("numpy")
    if loaded is None:
        return None
    state = loaded.random.get_state()
    return state, (state[1].tolist(), *state[2:])


class Patches:
    """Present functions of torch and of the model's classes.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        torch.compile(nn.Identity())  # the first call of a process replaces torch.manual_seed
        classes = {cls for module in model.modules() for cls in type(module).__mro__} - {object}
        owners: list[Any] = [torch, torch.nn.functional, torch.Tensor, *classes]
        self._kept = {owner: {name: value for name, value in vars(owner).items() if _is_callable(value)} for owner in owners}
        self._hooks = {name: dict(table) for name, table in hooks_of_all_modules().items()}

    def differences(self) -> list[str]:
        """Return the names of the functions that have been replaced since."""
        hooks = [name for name, table in hooks_of_all_modules().items() if dict(table) != self._hooks[name]]
        changed = [f"{_name(owner)}.{name}" for owner, name, _ in self._changed_functions()]
        return [*changed, *(f"the hooks of all modules, torch.nn.modules.module.{name}" for name in hooks[:1])]

    def put_back(self) -> None:
        """Restore the functions."""
        for owner, name, value in [*self._changed_functions()]:
            setattr(owner, name, value)
        for name, table in hooks_of_all_modules().items():
            table.clear()
            table.update(self._hooks[name])

    def _changed_functions(self) -> Iterator[tuple[Any, str, Any]]:
        for owner, functions in self._kept.items():
            now = vars(owner)
            yield from ((owner, name, value) for name, value in functions.items() if now.get(name) is not value)


def _is_callable(value: Any) -> bool:
    return (callable(value) and not isinstance(value, type)) or isinstance(value, (staticmethod, classmethod, property))


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
