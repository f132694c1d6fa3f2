"""``sch.use_kernels()``: fast kernels in the modules and graph patterns that compute the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from slapo_core import Primitive, Schedule, ScheduleError, UnknownNameError, get_logger, is_sharded, paths

from . import transformers_attention as attention
from .dispatch.dispatcher import choose, kernel_names
from .dispatch.registry import implementation_registry
from .lazy.logits import LazyHead
from .recognition.graph_patterns import FoundCall, find_calls
from .recognition.module_search import ServedModule, find_modules
from .replacements.kernel_modules import FusedForward, KernelCall, kernel_forward_of, with_kernels

_NAMED_ONLY = ("embedding", "linear_cross_entropy")


class UseKernelsPrimitive(Primitive):
    """Replace operations of this module and the modules below it by kernels that compute the same.

    Rewrite:
        y = norm(x)                               -->  y = rms_norm(x, norm.weight)
        y = down(act(gate(x)) * up(x))            -->  y = down(swiglu(gate(x), up(x)))
        y = norm(dropout(dense(x)) + residual)    -->  y = norm(bias_dropout_residual(x @ W, dense.bias, residual))

    Modules are recognised by the calls, attribute reads and side effects of their forward, and by its results on random
    numbers. A call in another dtype, or after an attribute has changed, runs the original forward. A replacement is an
    instance of a subclass of the module's class, with the same parameters and children under the same names. It calls its
    layers as before, so their hooks, shards and syncs work. Transformers' models switch their attention by Transformers' own
    interface, with its own masks, and then return no attention weights. In traced modules, patterns of operations are
    recognised as well; rotary embeddings and attention in plain operations are found there only.
    Hooks on a replacement keep firing. A module is not replaced if a kernel would do the work of a child that has a hook.
    Dropout draws the masks of the unmodified model for the same seed if the implementation's description says so.

    Args:
        names: A kernel or a list of kernels; default: all but ``"embedding"`` and ``"linear_cross_entropy"``. The latter lets
            the head of a model return logits that are computed on first use. A named kernel that finds nothing is an error,
            and so is a hook that prevents a replacement.
        force: Kernel, or ``"*"`` for all, to implementation; default: the first that is usable on the tensors' device. Earlier
            replacements keep their implementation. A forced kernel must be among the names.

    Raises:
        ScheduleError: unknown kernel or implementation; a missing package; a named kernel that finds nothing; a forced kernel
            that is replaced already or not among the names; a module that a named kernel would serve, but for a hook or
            wrapper.
    """

    name = "use_kernels"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, names: str | Iterable[str] | None = None, force: Mapping[str, str] | None = None) -> _Plan:
        """Find the modules, graph patterns and Transformers' models that kernels can serve."""
        wanted = _wanted_kernels(schedule, names)
        force = _checked_force(schedule, wanted, force, named=names is not None)
        forced = _forced_implementations(schedule, wanted, force)
        served = find_modules(schedule.mod, wanted)
        calls = find_calls(schedule, wanted, forced)
        plan = _Plan([each for each in served if each.opaque_path is None], calls, {}, forced, wanted)
        if "attention" in wanted:
            choice = forced.get("attention")
            if "attention" not in force and choice not in attention.NAMES:
                choice = None  # "*" forces one that Transformers does not have
            plan.attention.update(_attention(schedule, choice, named=names is not None))
        found = {kernel for each in served for kernel in each.kernel_forward.kernels} | {each.call.kernel for each in calls}
        found |= {"attention"} if plan.attention else set()
        for each in served:
            if each.opaque_path is None:
                continue
            opaque = paths.join(schedule.path, each.opaque_path)
            if names is None:
                get_logger().info("use_kernels: %r keeps its forward, as it has a hook or wrapper", opaque)
            elif isinstance(each.kernel_forward, LazyHead) and any(map(is_sharded, each.module.parameters())):
                raise _error(schedule, f"{opaque!r} is sharded; tensor_parallel(parallel_loss=True) makes losses of its parts")
            else:
                message = f"{opaque!r} has a hook or wrapper that a kernel would bypass; call use_kernels first"
                raise _error(schedule, message)
        if names is not None and (missing := [kernel for kernel in wanted if kernel not in found]):
            raise _error(schedule, f"nothing from here down computes {missing[0]!r}, or all that does is served already")
        if late := _late_force_problem(schedule, force, found):
            raise _error(schedule, f"{late}; undo() the step that serves it, and force it there")
        return plan

    @staticmethod
    def apply(
        schedule: Schedule, names: str | Iterable[str] | None = None, force: Mapping[str, str] | None = None, *, checked: _Plan
    ) -> None:
        """Put the replacements in, and record the paths per kernel in the metadata."""
        before: dict[str, tuple[str, ...]] = schedule.metadata.primitives["use_kernels"] or {}
        used: dict[str, list[str]] = {}
        for each in checked.served:
            kernels = [kernel for kernel in each.kernel_forward.kernels if kernel in checked.wanted]
            handle = schedule[each.path] if each.path else schedule
            new = with_kernels(each.module, checked.with_forced_implementations(each))
            handle.apply("replace", new, name="+".join(kernels))
            for kernel in kernels:
                used.setdefault(kernel, []).append(handle.path)
        for match, call in checked.calls:
            schedule.get_top_schedule().apply("replace", call, match, name=call.kernel)
            used.setdefault(call.kernel, []).append(match.path)
        for path, choices in checked.attention.items():
            handle = schedule[path] if path else schedule
            schedule.on_undo(attention.set_attention(handle.mod, choices))
            used.setdefault("attention", []).append(handle.path)
        found = {
            kernel: tuple(dict.fromkeys((*before.get(kernel, ()), *used.get(kernel, ())))) for kernel in {**before, **used}
        }
        schedule.metadata.primitives["use_kernels"] = found


class _Plan(NamedTuple):
    """Replacements of one step.

    Args:
        served: Modules to replace.
        calls: Kernel calls to put into traced modules.
        attention: Path of a model to Transformers' names of the attention to set, the preferred one first.
        forced: Kernel to the forced implementation.
        wanted: Names of the kernels.
    """

    served: list[ServedModule]
    calls: list[FoundCall]
    attention: dict[str, tuple[str, ...]]
    forced: dict[str, str]
    wanted: tuple[str, ...]

    def with_forced_implementations(self, each: ServedModule) -> Any:
        """Return a module's forward with the forced implementations, and eager ones for kernels that are not wanted."""
        kernel_forward = each.kernel_forward
        if not isinstance(kernel_forward, FusedForward):
            return replace(kernel_forward, choice=self.forced.get(kernel_forward.kernels[0]))
        choices = {kernel: self.forced.get(kernel) if kernel in self.wanted else "eager" for kernel in kernel_forward.kernels}
        return replace(kernel_forward, choices=tuple((kernel, choice) for kernel, choice in choices.items() if choice))


def _wanted_kernels(schedule: Schedule, names: str | Iterable[str] | None) -> tuple[str, ...]:
    known = kernel_names()
    if names is None:
        return tuple(kernel for kernel in known if kernel not in _NAMED_ONLY)
    if isinstance(names, Mapping):
        raise _error(schedule, "names is a mapping; give implementations as force=")
    if isinstance(names, Iterator):  # the journal could not record it either
        raise _error(schedule, f"names is a {type(names).__name__}, which is used up; give a list")
    if isinstance(names, bytes) or not isinstance(names, Iterable):
        raise _error(schedule, f"names is {names!r}, not a kernel or a list of them; available: {', '.join(sorted(known))}")
    given = [names] if isinstance(names, str) else list(names)
    for kernel in given:
        _check_name(schedule, kernel, known)
    if not given:
        raise _error(schedule, "the list of kernels is empty; leave it out for all of them")
    return tuple(dict.fromkeys(given))


def _check_name(schedule: Schedule, kernel: object, known: Iterable[str]) -> None:
    if not isinstance(kernel, str):
        raise _error(schedule, f"{kernel!r} is not the name of a kernel; available: {', '.join(sorted(known))}")
    if kernel not in known:
        raise _error(schedule, str(UnknownNameError.of("kernel", kernel, known)))


def _checked_force(schedule: Schedule, wanted: tuple[str, ...], force: Any, named: bool) -> Mapping[str, str]:
    """Return ``force`` with all its names checked."""
    if force is None:
        return {}
    if not isinstance(force, Mapping):
        example = f"{{'*': {force!r}}}" if isinstance(force, str) else "{'rms_norm': 'native'}"
        raise _error(schedule, f"force is {force!r}, not a mapping of kernels to implementations, such as {example}")
    for kernel, implementation in force.items():
        _check_name(schedule, kernel, [*kernel_names(), "*"])
        if not isinstance(implementation, str):
            raise _error(schedule, f"force has {implementation!r} for {kernel!r}, which is not the name of an implementation")
        if kernel != "*" and kernel not in wanted:
            reason = "which is not among the names" if named else "which is served only where it is named"
            raise _error(schedule, f"force has {kernel!r}, {reason}; add it to the names, or leave it out of force")
    return force


def _forced_implementations(schedule: Schedule, wanted: tuple[str, ...], force: Mapping[str, str]) -> dict[str, str]:
    """Return kernel to the forced implementation; each can be used on the weights' device and dtype."""
    device, dtype = _device_and_dtype(schedule.mod)
    found: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for kernel in kernel_names():
        implementation = force.get(kernel, force.get("*"))
        if implementation is None:
            continue
        try:
            choose(kernel, device, dtype, implementation)
        except ScheduleError as error:
            if kernel in force:
                raise
            reasons[kernel] = str(error)
            continue  # not every kernel that "*" stands for has such an implementation
        found[kernel] = implementation
    if "*" in force and found.keys().isdisjoint(wanted):
        name = force["*"]
        having = [kernel for kernel in wanted if kernel in reasons and name in implementation_registry().names(kernel)]
        reason = f", where the weights are: {reasons[having[0]]}" if having else ""
        raise _error(schedule, f"none of the kernels {'can use' if having else 'has'} the implementation {name!r}{reason}")
    return found


def _late_force_problem(schedule: Schedule, force: Mapping[str, str], found: Collection[str]) -> str | None:
    """Return the reason why ``force`` has no effect, as the modules were replaced earlier; else None."""
    served: set[str] = set()
    for module in schedule.mod.modules():
        kernel_forward = kernel_forward_of(module)
        if isinstance(module, KernelCall):
            served.add(module.kernel)
        elif kernel_forward is not None:
            served.update(kernel_forward.kernels)
    late = [kernel for kernel in force if kernel in served and kernel not in found]
    if not late and not ("*" in force and served and not found):
        return None
    what = f"computes {late[0]!r}" if late else "kernels serve"
    return f"all from here down that {what} is served already, and nothing is forced"


def _attention(schedule: Schedule, forced: str | None, named: bool) -> dict[str, tuple[str, ...]]:
    """Return the path of each Transformers' model to the names of attention to set, the preferred one first."""
    found: dict[str, tuple[str, ...]] = {}
    if any(isinstance(module, fx.GraphModule) for module in schedule.root_module.modules()):
        return found  # a graph is valid only for the attention it was traced with
    implementation = choose("attention", *_device_and_dtype(schedule.mod), forced).name
    name, sdpa = attention.NAMES.get(implementation), attention.NAMES["native"]
    for path, model in attention.transformers_models(schedule.mod).items():
        if name is None:
            reason: str | None = f"Transformers knows no attention {implementation!r}, but {', '.join(attention.NAMES)}"
        elif forced is None and not named and attention.attention_names(model) - {"eager", sdpa, "None"}:
            reason = f"it was made to attend by {sorted(attention.attention_names(model))[0]!r}"
        else:
            choices = (name,) if forced is not None else tuple(dict.fromkeys((name, sdpa)))
            reasons = {choice: attention.refusal(model, choice) for choice in choices}
            reason = next(iter(reasons.values()))
            if possible := tuple(choice for choice in choices if reasons[choice] is None):
                found[path] = possible
                continue
        if named or forced is not None:
            raise _error(schedule, f"{reason}; leave attention out, or force another implementation")
        get_logger().info("use_kernels: attention of %r is left as it is: %s", paths.join(schedule.path, path), reason)
    return found


def _device_and_dtype(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of the first floating weight; for meta weights, the device they will probably get."""
    weights = (each for each in module.parameters() if each.is_floating_point())
    weight = next(weights, torch.empty(0))
    if weight.is_meta:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), weight.dtype
    return weight.device, weight.dtype


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="use_kernels")
