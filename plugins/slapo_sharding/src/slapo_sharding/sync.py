"""``sync``: communicate at the boundary of a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from slapo_core import Primitive, Schedule, ScheduleError, paths

from .rules.sharding_rule import applied_cut
from .splitting import attention_heads
from .splitting.persistent_hooks import reduce_gradient, reduces_gradient, trainable
from .syncs.overlapped_reduction import SharedGradientReduction
from .syncs.sync_hooks import Sync

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")
_MODES = {"fwd_pre": _OPS, "fwd_post": _OPS, "bwd_post": ("all_reduce",), "grad": ("all_reduce",)}
_LAYOUTS = {"RR": None, "RS": -1, "SR": -2}
"""Layout in a scheme to the dimension that it shards."""
_NOTHING = "nothing"
_ARGUMENTS = {"fwd_pre": (2, 3), "fwd_post": (3, 4), "bwd_post": (3, 3)}
"""Mode to the number of arguments of a function, without and with the keyword inputs."""


class SyncPrimitive(Primitive):
    """Communicate over the tensor-parallel group before or after a module's forward, or in its backward.

    ============  ======================================================================================================
    ``fwd_pre``   the operation is applied to the first floating-point input, positional or keyword
    ``fwd_post``  the operation is applied to the output, or the first tensor in a tuple, list, mapping or dataclass
    ``bwd_post``  ``all_reduce``: the gradients of all the module's inputs are summed, also those of keyword and nested
                  inputs; forward changes nothing
    ``grad``      ``all_reduce``: the gradients of the module's own parameters, not of those inside it, are summed: for
                  replicated parameters that each rank uses on its own shard, as in a norm of heads or of a split sequence
    ============  ======================================================================================================

    ``all_reduce`` sums a partial tensor. ``all_gather`` joins shards along ``axis``, ``scatter`` keeps this rank's shard of a
    replicated tensor, and ``reduce_scatter`` sums and keeps this rank's shard. Each operation has its own backward, see
    ``slapo_sharding.communication.collectives``. ``bwd_post`` is for modules that use a replicated input for their own shards.

    A scheme gives the layouts of the last two dimensions before and after, R for replicated and S for sharded: ``"RR->RS"``
    scatters the last dimension, ``"SR->RR"`` gathers the one before it, ``"RS->SR"`` shards the other one instead. There are
    nine schemes; those from a layout to itself do nothing.

    A function has the signature of torch's hook of that kind, with or without keyword inputs: ``fn(module, args)`` or
    ``fn(module, args, kwargs)`` before the forward; ``fn(module, args, output)`` or ``fn(module, args, kwargs, output)`` after
    it; ``fn(module, grad_input, grad_output)`` after the backward. It must be importable if the schedule is to be saved. On
    one rank an operation does nothing, but a function is called.

    Modules that take the same tensor, such as the projections of an attention, can reduce its gradient together:
    ``sync("bwd_post", "all_reduce", of=["q_proj", "k_proj", "v_proj"])`` on a module around them costs one all-reduce, not
    three.

    Args:
        mode: ``"fwd_pre"``, ``"fwd_post"``, ``"bwd_post"`` or ``"grad"``.
        sync_op_or_fn: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"scatter"``, a scheme or a function.
        axis: Dimension of the tensor to gather, scatter or reduce-scatter along; may be negative.
        backward: For ``all_gather``: ``"split"`` if the code that follows is replicated or has its own syncs (default after
            the module), ``"reduce_scatter"`` if each rank uses its own shard of the result (default before it).
        of: For ``bwd_post``: paths below this module whose inputs are synced, instead of the module's own. For ``grad``: names
            of the module's own parameters, instead of all.
        tensor_parallel_output_grad: The established name of ``backward``: True if the output's gradient is partial, as in a
            tensor-parallel region, which is ``"reduce_scatter"``; False if it is replicated, which is ``"split"``.

    Raises:
        ScheduleError: unknown mode or operation, one that this mode does not take, a missing axis, a function with other
            arguments, no such module, or gradients that are replicated, or summed already.
    """

    name = "sync"
    scope = "module"
    over_group = True

    @staticmethod
    def check(
        schedule: Schedule,
        mode: str,
        sync_op_or_fn: str | Callable[..., Any],
        axis: int | None = None,
        *,
        backward: str | None = None,
        of: Sequence[str] | None = None,
        tensor_parallel_output_grad: bool | None = None,
    ) -> Sync:
        """Make the hook."""
        op, error = sync_op_or_fn, partial(ScheduleError, path=schedule.path, primitive="sync")
        if tensor_parallel_output_grad is not None:
            backward = _backward(op, backward, tensor_parallel_output_grad, error)
        if mode not in _MODES:
            raise error(f"no mode {mode!r}; available: {', '.join(_MODES)}")
        if mode == "grad":
            _check_grad(schedule, op, of, error)
        elif of is not None:
            _check_members(schedule, mode, op, of, error)
        if not isinstance(op, str):
            return Sync(mode, "function", fn=op, takes_kwargs=_takes_kwargs(mode, op, error))
        new_axis = None
        if "->" in op:
            op, axis, new_axis = _reshard(mode, op, axis, error)
        if op == _NOTHING:
            return Sync(mode, op)
        if op not in _OPS and new_axis is None:
            raise error(f"no operation {op!r}; available: {', '.join(_OPS)}, a scheme such as 'RS->RR', or a function")
        if op not in _MODES[mode] and new_axis is None:
            raise error(f"bwd_post takes all_reduce or a function, not {op!r}, which has its own backward; use a forward mode")
        if (axis is None) != (op == "all_reduce") or isinstance(axis, bool) or not isinstance(axis, int | None):
            raise error(
                f"axis is {axis!r}; {op} {'takes none' if op == 'all_reduce' else 'needs the dimension it works along'}"
            )
        if backward is not None and (op != "all_gather" or backward not in ("split", "reduce_scatter")):
            raise error(f"backward is {backward!r}; all_gather takes 'split' or 'reduce_scatter', the others have one backward")
        _check_gather(schedule, mode, op, error)
        default = "reduce_scatter" if mode == "fwd_pre" else "split"
        shared = SharedGradientReduction(schedule.group, 1 if of is None else len(of)) if mode == "bwd_post" else None
        return Sync(mode, op, axis, schedule.group, backward or default, shared=shared, new_axis=new_axis, path=schedule.path)

    @staticmethod
    def apply(
        schedule: Schedule,
        mode: str,
        sync_op_or_fn: str | Callable[..., Any],
        axis: int | None = None,
        *,
        backward: str | None = None,
        of: Sequence[str] | None = None,
        tensor_parallel_output_grad: bool | None = None,
        checked: Sync,
    ) -> None:
        """Register the hook."""
        module = schedule.mod
        if (checked.fn is None and schedule.world_size <= 1) or checked.op == _NOTHING:
            return
        if mode == "grad":
            own = _named_parameters(schedule, of)
            own = {} if _are_summed_by_plan(own) else own
            for name in own:
                # the partial gradients of a bias are equal where the loss is a mean, so the weight's are compared alone
                reduce_gradient(schedule, module, name, seen=name == "bias" and "weight" in own)
        elif checked.shared is not None:
            for each in _members(schedule, of):
                schedule.touch(each)
                each.register_forward_pre_hook(checked, with_kwargs=True)
        elif mode == "fwd_post":
            module.register_forward_hook(checked, with_kwargs=True)
        elif mode == "bwd_post" and checked.fn is not None:
            module.register_full_backward_hook(checked)
        else:
            module.register_forward_pre_hook(checked, with_kwargs=True)


def _backward(op: Any, backward: str | None, is_partial: Any, error: Callable[[str], ScheduleError]) -> str:
    """Return the backward that ``tensor_parallel_output_grad`` stands for."""
    if not isinstance(is_partial, bool) or op != "all_gather" or backward is not None:
        asked = f"tensor_parallel_output_grad is {is_partial!r} for {op!r} with backward={backward!r}"
        raise error(f"{asked}; give True or False for 'all_gather', without backward")
    return "reduce_scatter" if is_partial else "split"


def _reshard(
    mode: str, scheme: str, axis: int | None, error: Callable[[str], ScheduleError]
) -> tuple[str, int | None, int | None]:
    """Return the operation of a scheme, the dimension it works along, and the dimension that becomes sharded instead."""
    before, _, after = scheme.partition("->")
    if before not in _LAYOUTS or after not in _LAYOUTS:
        raise error(f"no scheme {scheme!r}; each side is one of {', '.join(_LAYOUTS)}")
    if mode not in ("fwd_pre", "fwd_post") or axis is not None:
        raise error(f"{scheme!r} with mode {mode!r} and axis={axis!r}; it goes with 'fwd_pre' or 'fwd_post', without axis")
    old, new = _LAYOUTS[before], _LAYOUTS[after]
    if old == new:
        return _NOTHING, None, None
    if old is None:
        return "scatter", new, None
    return ("all_gather", old, None) if new is None else ("all_to_all", old, new)


def _takes_kwargs(mode: str, fn: Callable[..., Any], error: Callable[[str], ScheduleError]) -> bool:
    fewest, most = _ARGUMENTS[mode]
    if not callable(fn):
        raise error(f"{fn!r} is neither an operation nor a function; available: {', '.join(_OPS)}, or a function")
    signature = inspect.signature(fn)
    for count in (most, fewest):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count > fewest
    raise error(f"the function takes {signature}; a {mode} function is called with {fewest} or {most} arguments")


def _members(schedule: Schedule, of: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules whose inputs a ``bwd_post`` sync is for."""
    module = schedule.mod
    return [module] if of is None else [found for path in of if (found := paths.find(module, path)) is not None]


def _check_members(schedule: Schedule, mode: str, op: Any, of: Any, error: Callable[[str], ScheduleError]) -> None:
    if (mode, op) != ("bwd_post", "all_reduce"):
        raise error(f"of goes with 'bwd_post' and 'all_reduce', not with {mode!r} and {op!r}; sync each module for itself")
    if isinstance(of, str) or not of or not all(isinstance(path, str) for path in of):
        raise error(f"of is {of!r}; give a list of paths below the module, e.g. ['q_proj', 'k_proj', 'v_proj']")
    found = [paths.find(schedule.mod, path) if path else None for path in of]
    if None in found:
        raise error(f"of names {of[found.index(None)]!r}, which is not a module below; give paths below the module")
    if len({*found}) < len(of):
        raise error(f"of names a module twice: {', '.join(of)}; name each once")


def _check_gather(schedule: Schedule, mode: str, op: str, error: Callable[[str], ScheduleError]) -> None:
    """Refuse to gather heads for an attention module that counts local ones."""
    applied, parent = applied_cut(schedule.mod), schedule.parent
    if (mode, op) != ("fwd_post", "all_gather") or applied is None or applied.gathered or parent is None:
        return
    if attention_heads.counts_local_heads(parent.mod) and attention_heads.makes_heads(parent.mod, schedule.name):
        raise error("the attention module counts local heads already; shard with gathered=True before gathering")


def _named_parameters(schedule: Schedule, of: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the module's own trainable parameters that the sync is for, by name."""
    return {name: parameter for name, parameter in trainable(schedule.mod).items() if of is None or name in of}


def _are_summed_by_plan(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Return whether a plan sums these gradients already; another sync then changes nothing."""
    return all(reduces_gradient(parameter, by_plan=True) for parameter in parameters.values())


def _check_grad(schedule: Schedule, op: Any, of: Sequence[str] | None, error: Callable[[str], ScheduleError]) -> None:
    own = _named_parameters(schedule, of)
    if isinstance(of, str) or (of is not None and not own.keys() >= {*of}):
        known = ", ".join(trainable(schedule.mod))
        raise error(f"of is {of!r}; give names of trainable parameters of the module itself: {known}")
    if op != "all_reduce":
        raise error(f"grad takes all_reduce, not {op!r}; sum the gradients")
    if (applied := applied_cut(schedule.mod)) is not None and not applied.keeps_own:
        raise error("the module is sharded, so the gradients of its parameters are right already; leave this sync out")
    if not own:
        raise error("the module itself has no trainable parameters; take one inside of it")
    if _are_summed_by_plan(own):
        return
    if any(map(reduces_gradient, own.values())):
        raise error("the gradients of its parameters are summed already; sync them once")
