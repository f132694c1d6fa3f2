"""``sch.use_kernels()``: fast kernels in the modules that compute what they do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from slapo_core import Primitive, Schedule, ScheduleError, UnknownNameError, get_logger, is_sharded, paths

from .dispatch.dispatcher import choose, kernel_names
from .dispatch.registry import table
from .lazy.logits import LazyHead
from .recognition.graph_patterns import FoundCall, find_calls
from .recognition.module_search import Served, find_modules
from .replacements.kernel_modules import KernelCall, Program, body_of, swapped
from .transformers_attention import attn_implementation as attention

_NAMED_ONLY = ("embedding", "linear_cross_entropy")


class UseKernelsPrimitive(Primitive):
    """Let the modules from this one down compute with kernels, wherever they compute what a kernel does.

    Rewrite:
        y = norm(x)                               -->  y = rms_norm(x, norm.weight)
        y = down(act(gate(x)) * up(x))            -->  y = down(swiglu(gate(x), up(x)))
        y = norm(dropout(dense(x)) + residual)    -->  y = norm(bias_dropout_residual(x @ W, dense.bias, residual))

    Modules are found by what their forward calls, reads and leaves behind, and by what it makes of random numbers; where it
    goes otherwise, in another dtype or after a setting has changed, their own forward runs. What is put in is of a subclass
    of the module's class, with the same parameters and parts under the same names; layers in it are called as before, so
    hooks on them, shards and syncs work. Models of Transformers are told how to attend by its own interface, with its own
    masks, and give no attention weights then; in modules that are traced, operations are found as well, rotations and
    attention that is written out only there.
    Hooks on what is put in keep firing; where a kernel would do the work of a part that something is hooked to, the module is
    left as it is. Dropout has the masks of the unmodified model for the same seed where the implementation says so.

    Args:
        names: A kernel or a list of them; default: all but ``"embedding"`` and ``"linear_cross_entropy"``, which lets the head
            of a model return logits that nobody computes before somebody looks at them. What nothing computes is an error
            then, and so is what would be served, were nothing hooked to it.
        force: Kernel, or ``"*"`` for all, to implementation; default: the first that is usable where the tensors are. What
            is served already keeps its own, and kernels that are not among the names have none.

    Raises:
        ScheduleError: unknown kernel or implementation, a package that is missing, a named kernel that finds nothing, one that
            is forced and served already or not among the names, or a module that a named one would serve but for what is
            hooked to it or put around it.
    """

    name = "use_kernels"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, names: str | Iterable[str] | None = None, force: Mapping[str, str] | None = None) -> _Plan:
        """Find what kernels serve."""
        wanted = _wanted(schedule, names)
        force = _checked(schedule, wanted, force, named=names is not None)
        forced = _forced(schedule, wanted, force)
        served = find_modules(schedule.mod, wanted)
        calls = find_calls(schedule, wanted, forced)
        plan = _Plan([each for each in served if each.hooked is None], calls, {}, forced, wanted)
        if "attention" in wanted:
            plan.attention.update(_attention(schedule, _forced_attention(forced, force), named=names is not None))
        found = {kernel for each in served for kernel in each.body.kernels} | {each.call.kernel for each in calls}
        found |= {"attention"} if plan.attention else set()
        for each in served:
            if each.hooked is not None and names is not None:
                if isinstance(each.body, LazyHead) and any(map(is_sharded, each.module.parameters())):
                    path = _below(schedule, each.path)
                    raise _error(
                        schedule, f"{path!r} is sharded; tensor_parallel(parallel_loss=True) makes losses of its parts"
                    )
                message = (
                    f"something is hooked to {_below(schedule, each.hooked)!r}, or put around it, that a kernel would pass by"
                )
                raise _error(schedule, f"{message}; call use_kernels first")
            if each.hooked is not None:
                get_logger().info("use_kernels: %r is left as it is, something is hooked to it", _below(schedule, each.hooked))
        if names is not None and (missing := [kernel for kernel in wanted if kernel not in found]):
            raise _error(schedule, f"nothing from here down computes {missing[0]!r}, or all that does is served already")
        if late := _late(schedule, force, found):
            raise _error(schedule, f"{late}; undo() the step that serves it, and force it there")
        return plan

    @staticmethod
    def apply(
        schedule: Schedule,
        names: str | Iterable[str] | None = None,
        force: Mapping[str, str] | None = None,
        *,
        checked: _Plan,
    ) -> None:
        """Swap."""
        before: dict[str, tuple[str, ...]] = schedule.metadata.primitives["use_kernels"] or {}
        used: dict[str, list[str]] = {}
        for each in checked.served:
            kernels = [kernel for kernel in each.body.kernels if kernel in checked.wanted]
            handle = schedule[each.path] if each.path else schedule
            handle.apply("replace", swapped(each.module, checked.forced_body(each)), name="+".join(kernels))
            for kernel in kernels:
                used.setdefault(kernel, []).append(handle.path)
        for match, call in checked.calls:
            schedule.get_top_schedule().apply("replace", call, match, name=call.kernel)
            used.setdefault(call.kernel, []).append(match.path)
        for path, choices in checked.attention.items():
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
    if isinstance(names, Mapping):
        raise _error(schedule, "names is a mapping; give implementations as force=")
    if isinstance(names, Iterator):  # and could not be written down
        raise _error(schedule, f"names is a {type(names).__name__}, which is used up; give a list")
    if isinstance(names, bytes) or not isinstance(names, Iterable):
        raise _error(schedule, f"names is {names!r}, not a kernel or a list of them; available: {', '.join(sorted(known))}")
    given = [names] if isinstance(names, str) else list(names)
    for kernel in given:
        _known(schedule, kernel, known)
    if not given:
        raise _error(schedule, "the list of kernels is empty; leave it out for all of them")
    return tuple(dict.fromkeys(given))


def _known(schedule: Schedule, kernel: object, known: Iterable[str]) -> None:
    if not isinstance(kernel, str):
        raise _error(schedule, f"{kernel!r} is no name of a kernel; available: {', '.join(sorted(known))}")
    if kernel not in known:
        raise _error(schedule, str(UnknownNameError.of("kernel", kernel, known)))


def _checked(schedule: Schedule, wanted: tuple[str, ...], force: Any, named: bool) -> Mapping[str, str]:
    """What is forced, of kernels that are wanted."""
    if force is None:
        return {}
    if not isinstance(force, Mapping):
        example = f"{{'*': {force!r}}}" if isinstance(force, str) else "{'rms_norm': 'native'}"
        raise _error(schedule, f"force is {force!r}, not a mapping of kernels to implementations, such as {example}")
    for kernel, implementation in force.items():
        _known(schedule, kernel, [*kernel_names(), "*"])
        if not isinstance(implementation, str):
            raise _error(schedule, f"force has {implementation!r} for {kernel!r}, which is no name of an implementation")
        if kernel != "*" and kernel not in wanted:
            reason = "which is not among the names" if named else "which is served only where it is named"
            raise _error(schedule, f"force has {kernel!r}, {reason}; add it to the names, or leave it out of force")
    return force


def _forced(schedule: Schedule, wanted: tuple[str, ...], force: Mapping[str, str]) -> dict[str, str]:
    """Kernel to the implementation that is forced; each can be used where the weights are."""
    device, dtype = _where(schedule.mod)
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
            continue  # of those that "*" stands for some may have no such implementation
        found[kernel] = implementation
    if "*" in force and found.keys().isdisjoint(wanted):
        name = force["*"]
        having = [kernel for kernel in wanted if kernel in reasons and name in table().names(kernel)]
        reason = f", where the weights are: {reasons[having[0]]}" if having else ""
        raise _error(schedule, f"none of the kernels {'can use' if having else 'has'} the implementation {name!r}{reason}")
    return found


def _late(schedule: Schedule, force: Mapping[str, str], found: Collection[str]) -> str | None:
    """Why something that is forced comes too late; None where it finds something, or nothing was there for it to find."""
    served: set[str] = set()
    for module in schedule.mod.modules():
        body = body_of(module)
        served |= {module.kernel} if isinstance(module, KernelCall) else set() if body is None else set(body.kernels)
    late = [kernel for kernel in force if kernel in served and kernel not in found]
    if not late and not ("*" in force and served and not found):
        return None
    what = f"computes {late[0]!r}" if late else "kernels serve"
    return f"all from here down that {what} is served already, and nothing is forced"


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
