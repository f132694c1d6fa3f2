"""``sch.use_kernels()``: fast kernels in the modules that compute what they do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from slapo_core import paths
from slapo_core.errors import ScheduleError, UnknownNameError
from slapo_core.logger import get_logger
from slapo_core.primitive import Primitive
from slapo_core.schedule import Schedule

from .recognise import attention
from .recognise.graphs import FoundCall, find_calls
from .recognise.modules import Served, find_modules
from .registry import choose, kernel_names
from .swapped import Program, swapped

_NAMED_ONLY = ("embedding", "linear_cross_entropy")


class UseKernelsPrimitive(Primitive):
    """Let the modules from this one down compute with kernels, wherever they compute what a kernel does.

    Rewrite:
        y = norm(x)                               -->  y = rms_norm(x, norm.weight)
        y = down(act(gate(x)) * up(x))            -->  y = down(swiglu(gate(x), up(x)))
        y = norm(dropout(dense(x)) + residual)    -->  y = norm(bias_dropout_residual(x @ W, dense.bias, residual))

    Modules are found by what they compute: norms are run on random numbers, small modules are traced and what is between
    their layers is run on numbers. What is put in is of a subclass of the module's class, with the same parameters and parts
    under the same names; layers in it are called as before, so hooks on them, shards and syncs work. Models of Transformers are
    told how to attend by its own interface, with its own masks, and give no attention weights then; in modules that are traced,
    operations are found as well, rotations and attention that is written out only there.
    Hooks on what is put in keep firing; where a kernel would do the work of a part that something is hooked to, the module is
    left as it is. Dropout has the masks of the unmodified model for the same seed where the implementation says so.

    Args:
        names: A kernel or a list of them; default: all but ``"embedding"`` and ``"linear_cross_entropy"``, which lets the head
            of a model return logits that nobody computes before somebody looks at them. What nothing computes is an error
            then, and so is what would be served, were nothing hooked to it.
        force: Kernel, or ``"*"`` for all, to implementation; default: the first that is usable where the tensors are.

    Raises:
        ScheduleError: unknown kernel or implementation, a package that is missing, a named kernel that finds nothing, or a
            module that it would serve but for what is hooked to it or put around it.
    """

    name = "use_kernels"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, names: str | Iterable[str] | None = None, force: Mapping[str, str] | None = None) -> _Plan:
        """Find what kernels serve."""
        wanted = _wanted(schedule, names)
        forced = _forced(schedule, wanted, force or {})
        served = find_modules(schedule.mod, wanted)
        calls = find_calls(schedule, wanted, forced)
        plan = _Plan([each for each in served if each.hooked is None], calls, {}, forced, wanted)
        if "attention" in wanted:
            plan.attention.update(_attention(schedule, _forced_attention(forced, force or {}), named=names is not None))
        found = {kernel for each in served for kernel in each.body.kernels} | {each.call.kernel for each in calls}
        found |= {"attention"} if plan.attention else set()
        for each in served:
            if each.hooked is not None and names is not None:
                message = (
                    f"something is hooked to {_below(schedule, each.hooked)!r}, or put around it, that a kernel would pass by"
                )
                raise _error(schedule, f"{message}; call use_kernels first")
            if each.hooked is not None:
                get_logger().info("use_kernels: %r is left as it is, something is hooked to it", _below(schedule, each.hooked))
        if names is not None and (missing := [kernel for kernel in wanted if kernel not in found]):
            raise _error(schedule, f"nothing from here down computes {missing[0]!r}, or all that does is served already")
        return plan

    @staticmethod
    def apply(schedule: Schedule, names: str | Iterable[str] | None = None, force: Mapping[str, str] | None = None) -> None:
        """Swap."""
        plan: _Plan = schedule.checked
        before: dict[str, tuple[str, ...]] = schedule.metadata.primitives["use_kernels"] or {}
        used: dict[str, list[str]] = {}
        for each in plan.served:
            kernels = [kernel for kernel in each.body.kernels if kernel in plan.wanted]
            handle = schedule[each.path] if each.path else schedule
            handle.apply("replace", swapped(each.module, plan.forced_body(each)), name="+".join(kernels))
            for kernel in kernels:
                used.setdefault(kernel, []).append(handle.path)
        for match, call in plan.calls:
            schedule.get_top_schedule().apply("replace", call, match, name=call.kernel)
            used.setdefault(call.kernel, []).append(match.path)
        for path, choices in plan.attention.items():
            handle = schedule[path] if path else schedule
            schedule.on_undo(attention.tell(handle.mod, choices))
            used.setdefault("attention", []).append(handle.path)
        found = {
            kernel: tuple(dict.fromkeys((*before.get(kernel, ()), *used.get(kernel, ())))) for kernel in {**before, **used}
        }
        schedule.metadata.primitives["use_kernels"] = found


class _Plan(NamedTuple):
    """What a step does.

    Args:
        served: Modules to swap.
        calls: What to put into traced modules.
        attention: Path of a model to what Transformers calls the attention it is told to use, and the one to use otherwise.
        forced: Kernel to implementation.
        wanted: The kernels.
    """

    served: list[Served]
    calls: list[FoundCall]
    attention: dict[str, tuple[str, ...]]
    forced: dict[str, str]
    wanted: tuple[str, ...]

    def forced_body(self, each: Served) -> Any:
        """What a module computes, with the implementations that are forced; plain torch for a kernel that is not wanted."""
        body = each.body
        if not isinstance(body, Program):
            return replace(body, choice=self.forced.get(body.kernels[0]))
        choices = {kernel: self.forced.get(kernel) if kernel in self.wanted else "eager" for kernel in body.kernels}
        return replace(body, choices=tuple((kernel, choice) for kernel, choice in choices.items() if choice))


def _wanted(schedule: Schedule, names: str | Iterable[str] | None) -> tuple[str, ...]:
    known = kernel_names()
    if names is None:
        return tuple(kernel for kernel in known if kernel not in _NAMED_ONLY)
    given = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    for kernel in given:
        if kernel not in known:
            raise _error(schedule, str(UnknownNameError.of("kernel", str(kernel), known)))
    if not given:
        raise _error(schedule, "the list of kernels is empty; leave it out for all of them")
    return given


def _forced(schedule: Schedule, wanted: tuple[str, ...], force: Mapping[str, str]) -> dict[str, str]:
    """Kernel to the implementation that is forced; each can be used where the weights are."""
    known, device, dtype = kernel_names(), *_where(schedule.mod)
    for kernel in force:
        if kernel != "*" and kernel not in known:
            raise _error(schedule, str(UnknownNameError.of("kernel", kernel, [*known, "*"])))
    found = {}
    for kernel in known:
        implementation = force.get(kernel, force.get("*"))
        if implementation is None:
            continue
        try:
            choose(kernel, device, dtype, implementation)
        except ScheduleError:
            if kernel in force:
                raise
            continue  # of those that "*" stands for some may have no such implementation
        found[kernel] = implementation
    if "*" in force and found.keys().isdisjoint(wanted):
        raise _error(schedule, f"none of the kernels has the implementation {force['*']!r} where the weights are")
    return found


def _forced_attention(forced: Mapping[str, str], force: Mapping[str, str]) -> str | None:
    """What Transformers is to attend by; where "*" stands for what it has no word for, nothing is forced."""
    name = forced.get("attention")
    return name if "attention" in force or name in attention.NAMES else None


def _attention(schedule: Schedule, forced: str | None, named: bool) -> dict[str, tuple[str, ...]]:
    """Path below the schedule's of each model of Transformers, to the attention it is to use, the preferred one first."""
    found: dict[str, tuple[str, ...]] = {}
    if any(isinstance(module, fx.GraphModule) for module in schedule.root_module.modules()):
        return found  # graphs hold for the attention they were traced with
    implementation = choose("attention", *_where(schedule.mod), forced).name
    name, sdpa = attention.NAMES.get(implementation), attention.NAMES["native"]
    for path, model in attention.models(schedule.mod).items():
        if name is None:
            reason: str | None = f"Transformers knows no attention {implementation!r}, but {', '.join(attention.NAMES)}"
        elif forced is None and not named and attention.current(model) - {"eager", sdpa, "None"}:
            reason = f"it was made to attend by {sorted(attention.current(model))[0]!r}"
        else:
            choices = (name,) if forced is not None else tuple(dict.fromkeys((name, sdpa)))
            reasons = {choice: attention.refusal(model, choice) for choice in choices}
            reason = next(iter(reasons.values()))
            if possible := tuple(choice for choice in choices if reasons[choice] is None):
                found[path] = possible
                continue
        if named or forced is not None:
            raise _error(schedule, f"{reason}; leave attention out, or force another implementation")
        get_logger().info("use_kernels: attention of %r is left as it is: %s", _below(schedule, path), reason)
    return found


def _where(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the first floating weight; of weights on the meta device, where they are likely to go."""
    weights = (each for each in module.parameters() if each.is_floating_point())
    weight = next(weights, torch.empty(0))
    if weight.is_meta:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), weight.dtype
    return weight.device, weight.dtype


def _below(schedule: Schedule, path: str) -> str:
    return paths.join(schedule.path, path)


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="use_kernels")
