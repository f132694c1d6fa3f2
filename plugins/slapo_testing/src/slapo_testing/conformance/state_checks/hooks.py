"""Check of hooks that were registered before the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from slapo_core import Schedule

from ..examples.case import Case, ConformanceError

Hook = Callable[[nn.Module, str, dict[str, int]], None]
"""Function that registers counting hooks on a module, given a label and the counters."""


def hooks(case: Case) -> None:
    """Check that hooks of the module, of the model and of its parameters run as often as before."""
    _fire_as_before(case, _forward_hooks)
    if not {"names", "requires_grad"} & {*case.example.changes}:  # what has no gradients has none to give to a hook
        _fire_as_before(case, _backward_hooks)


def _fire_as_before(case: Case, hook: Hook) -> None:
    expected: dict[str, int] = {}
    plain = case.begin(plain=True)
    _hook(case, plain, hook, expected)
    if not _runs_with_hooks(case, plain, hook):
        return
    fired: dict[str, int] = {}
    schedule = case.begin()
    _hook(case, schedule, hook, fired)
    if not case.accepts(schedule, "the step on a module with hooks", partial(case.step, schedule)):
        return
    if not case.accepts(schedule, "a step after that on a module with hooks", partial(case.finish, schedule)):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as of the unmodified model
        case.run(schedule.mod)
    for what, count in expected.items():
        if fired.get(what, 0) != count:
            raise ConformanceError(f"{what} fires {fired.get(what, 0)} times in a step of training, {count} before")


def _runs_with_hooks(case: Case, plain: Schedule, hook: Hook) -> bool:
    """Return True if the unmodified model runs with the hooks. One that modifies an output in place does not run with all."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no gradient of inputs to give to a hook
            case.run(plain.mod)
    except RuntimeError:
        if hook is _backward_hooks:
            return False
        raise
    return True


def _hook(case: Case, schedule: Schedule, hook: Hook, fired: dict[str, int]) -> None:
    module = case.at(schedule).mod
    for label, hooked in {"the model": schedule.mod, "the module": module}.items():
        hook(hooked, label, fired)
    if hook is _backward_hooks or {"values", "names", "requires_grad"} & {*case.example.changes}:
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            what = f"the gradient hook of {name!r}"
            parameter.register_hook(_CountingHook(fired, what))  # type: ignore[no-untyped-call]


def _forward_hooks(module: nn.Module, label: str, fired: dict[str, int]) -> None:
    module.register_forward_pre_hook(_CountingHook(fired, f"the forward pre-hook of {label}"))
    module.register_forward_hook(_CountingHook(fired, f"the forward hook of {label}"))
    kind = "hook with keyword arguments"
    module.register_forward_pre_hook(_CountingHook(fired, f"the forward pre-{kind} of {label}", 3), with_kwargs=True)
    module.register_forward_hook(_CountingHook(fired, f"the forward {kind} of {label}", 4), with_kwargs=True)


def _backward_hooks(module: nn.Module, label: str, fired: dict[str, int]) -> None:
    module.register_full_backward_pre_hook(_CountingHook(fired, f"the backward pre-hook of {label}"))
    module.register_full_backward_hook(_CountingHook(fired, f"the backward hook of {label}"))


class _CountingHook:
    """Hook that counts its calls; copies of it count there too.

    Args:
        fired: Counters by name.
        what: Name of this hook.
        arguments: Number of arguments it must receive; 0: any.
    """

    def __init__(self, fired: dict[str, int], what: str, arguments: int = 0) -> None:
        self.fired, self.what, self.arguments = fired, what, arguments

    def __call__(self, *given: Any) -> None:
        self.fired[self.what] = self.fired.get(self.what, 0) + (self.arguments in (0, len(given)))
