"""Run a function without keeping its activations; the backward pass runs it again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CellType, FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from slapo_core import ScheduleError
from slapo_tracing.nodes import forward_wrappers

from ..forward_state._torch_private import is_watched, runs_eagerly, uncompiled
from ..forward_state.arguments import Arguments
from ..forward_state.module_state import StartState, version_of
from ..forward_state.random_state import RandomState
from ..forward_state.value_kinds import Kind, kind_of
from ..selective_checkpoint.policies import Listed, contexts_of
from .cpu_offload import Offloaded, offloaded_in, offloading_aside
from .result_comparison import Sample

_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Keyword arguments that are torch's, not the function's."""


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Checkpoint a model or part of the model.

    As ``torch.utils.checkpoint.checkpoint``, with these differences: the random states that Slapo tracks beside the
    default one, Python's and NumPy's are put back for the recompute too, keyword arguments reach ``function`` in both
    modes, and without gradients ``function`` is just called. Buffers and attributes that a forward changes advance once,
    in the modules that ``function`` is, is a method of, has among its arguments, or refers to as a closure or ``partial``;
    so do random generators found there. What it changes or draws from elsewhere, in an object of another kind or a global
    for one, advances again in the recompute, which nobody notices here.

    Args:
        function: What to run, and to run again in the backward pass.
        *args: Its positional arguments.
        use_reentrant: Torch's older implementation; it gives no gradients unless a tensor argument requires one.
        **kwargs: Its keyword arguments, and torch's options: ``preserve_rng_state``, and without ``use_reentrant``
            ``context_fn``, ``determinism_check``, ``debug``, ``early_stop``.

    Returns:
        What ``function`` returns.

    Raises:
        ScheduleError: it gets an iterator, returns a generator, writes to an argument in place, or, with ``use_reentrant``,
            returns tensors in anything but a tuple.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # its own way to recompute sees to random states
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    _check_arguments("", *args, *kwargs.values())
    region = _Region(function, args, kwargs, _found_in((function, args, kwargs)), options.get("preserve_rng_state", True))
    region.check = partial(_check_result, "", use_reentrant)
    options["preserve_rng_state"] = region.leaves_random_states_to_torch
    return torch_checkpoint.checkpoint(region, *region.arguments.give(), use_reentrant=use_reentrant, **options)


class Checkpointed:
    """The forward wrapper that ``sch.checkpoint()`` puts around a module; every keyword is the module's.

    Args:
        policy: What is kept, see ``contexts_of``.
        path: Of the module, for messages.
    """

    def __init__(self, policy: Any = None, path: str = "") -> None:
        self._policy = Listed.of(policy) or policy  # what can be pickled with the model
        self._path = path

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward, and again in the backward."""
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        _check_arguments(self._path, *args, *kwargs.values())
        found = _found_in(call)
        region = _Region(call, args, kwargs, found + _generators_in(args, kwargs))
        region.check = partial(_check_result, self._path, False)
        contexts = contexts_of(self._policy)
        options: dict[str, Any] = {"preserve_rng_state": region.leaves_random_states_to_torch}
        if contexts is not None:
            options["context_fn"] = contexts
        if self not in _compared and not _partitioned_by_zero(found):
            region.compare = self._compare
            options["early_stop"] = False  # to the result
        offloaded = offloaded_in(call)
        with offloaded.moving(call) if offloaded is not None else nullcontext():  # the inputs are all that is kept
            return torch_checkpoint.checkpoint(region, *region.arguments.give(), use_reentrant=False, **options)

    def _compare(self, before: Sample, now: Sample) -> None:
        if before.differs(now):
            what = "the recompute finds other numbers than the forward, and gradients would be wrong"
            advice = "keep random generators and counts in attributes of the module, or leave the module as it is"
            raise ScheduleError(f"{what}: something that it draws from or changes went on; {advice}", **_of(self._path))
        _compared.add(self)


# whose recompute has found what the forward did; beside the wrappers, as these are part of a model
_compared: WeakSet[Checkpointed] = WeakSet()


def _partitioned_by_zero(found: list[Any]) -> bool:
    """Return whether DeepSpeed's ZeRO has parts of the parameters.

    Behind a module's forward, which a recompute that goes on to the result reaches, it frees what the backward of that module
    waits to use.
    """
    modules = (each for each in found if isinstance(each, nn.Module))
    return any(hasattr(parameter, "ds_status") for module in modules for parameter in module.parameters())


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether ``sch.checkpoint()`` has wrapped a module's forward."""
    return any(isinstance(wrapper, Checkpointed) for wrapper in forward_wrappers(module))


class _Region:
    """The function with its arguments: called once for the forward, and once for each recompute.

    Attributes:
        leaves_random_states_to_torch: Whether torch has to put back the states of devices that are not seen to here.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: list[Any],
        preserve_rng_state: bool = True,
    ) -> None:
        modules = [each for each in found if isinstance(each, nn.Module)]
        self.function = function
        self.arguments = Arguments(args, kwargs)
        self._original: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._random = RandomState() if preserve_rng_state else None
        self.leaves_random_states_to_torch = self._random is not None and not self._random.covers(self.arguments.tensors)
        self._state = StartState(modules, [each for each in found if not isinstance(each, nn.Module)])
        self._is_eager, self._is_watched = runs_eagerly(), is_watched()
        self.check: Callable[[Any, bool], None] = lambda result, wrote: None
        self.compare: Callable[[Sample, Sample], None] | None = None
        self._sample: Sample | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._original is not None:  # the forward: what it does to its arguments, the caller sees
            (args, kwargs), self._original = self._original, None
            versions = [*map(version_of, tensors)]
            with offloading_aside():
                result = self.function(*args, **kwargs)
            self.check(result, versions != [*map(version_of, tensors)])
            self._state.keep_changed()
            self._sample = Sample(result) if self.compare is not None else None
            return result
        args, kwargs = self.arguments.rebuild(tensors)
        with (
            self._random.again() if self._random else nullcontext(),
            self._state.again(),
            self._as_before(),
            offloading_aside(),
        ):
            result = self.function(*args, **kwargs)
        if self.compare is not None and self._sample is not None:
            before, self._sample = self._sample, None
            self.compare(before, Sample(result))
        return result

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Run inside as the forward ran, compiled or not: compiled code and kernels save other tensors than eager code."""
        stance = torch.compiler.set_stance("force_eager") if self._is_eager and not runs_eagerly() else nullcontext()
        with stance, _Onlooker() if self._is_watched and not is_watched() else nullcontext():
            yield


class _Onlooker(TorchFunctionMode):
    """Looks at torch functions, and does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _check_arguments(path: str, *given: Any) -> None:
    """Refuse what the forward uses up."""
    for value in given:
        if isinstance(value, Iterator):
            what = f"an argument is a {type(value).__name__}, of which nothing is left for the recompute"
            raise ScheduleError(f"{what}; pass a list", **_of(path))


def _check_result(path: str, use_reentrant: bool, result: Any, wrote: bool) -> None:
    """Refuse what a recompute cannot stand for; ``wrote`` tells that an argument was written to."""
    if wrote and (use_reentrant or any(tensor.requires_grad for tensor in Arguments((result,), {}).tensors)):
        what = "the forward writes to an argument in place, which a recompute needs as it was"
        raise ScheduleError(f"{what}; let it write to a copy, as x.clone() or inplace=False", **_of(path))
    parts = result if isinstance(result, (tuple, list)) else [result]
    for part in parts:
        if isinstance(part, (Generator, Coroutine, AsyncGenerator)):
            what = f"the forward returns a {type(part).__name__}, which runs when the checkpoint is over; return its values"
            raise ScheduleError(what, **_of(path))
    if not use_reentrant:
        return
    inside = [part for part in result if not isinstance(part, torch.Tensor)] if isinstance(result, tuple) else [result]
    for part in inside if not isinstance(result, torch.Tensor) else ():
        if any(tensor.is_floating_point() for tensor in Arguments((part,), {}).tensors):
            what = f"the function returns tensors in a {type(part).__name__}, which get no gradients with use_reentrant=True"
            raise ScheduleError(f"{what}; pass use_reentrant=False", **_of(path))


def _of(path: str) -> dict[str, Any]:
    return {"path": path, "primitive": "checkpoint"}


def _generators_in(*given: Any) -> list[Any]:
    return [found for found in _found_in(given) if not isinstance(found, nn.Module)]


def _found_in(value: Any) -> list[Any]:
    """The modules and random generators that a call can see to change: itself, its object, arguments, what it closes over."""
    found: list[Any] = []
    seen: dict[
        int, Any
    ] = {}  # keeps them: some are made on access, and another object could get the number of one that is gone
    waiting = [value]
    while waiting:
        value = waiting.pop()
        kind = kind_of(type(value))
        if kind is Kind.ATOM or kind is Kind.TENSOR or id(value) in seen:
            continue
        seen[id(value)] = value
        if kind is Kind.MODULE or kind is Kind.GENERATOR:
            found.append(value)
        else:
            waiting += _inside(value)
    return found


def _inside(value: Any) -> list[Any]:
    """Return what ``_found_in`` looks at next in a value."""
    if type(value) in (tuple, list):
        return [*value]
    if type(value) is dict:
        return [*value.values()]
    inside: list[Any] = [getattr(value, "__self__", None), getattr(value, "__wrapped__", None)]
    if isinstance(value, partial):
        inside += [value.func, value.args, value.keywords]
    elif isinstance(value, FunctionType):
        inside += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        inside += [value.__defaults__, value.__kwdefaults__]
    elif isinstance(value, (tuple, list, dict)):
        inside += value.values() if isinstance(value, dict) else value
    return inside


# inside of a compiled module the compiler would try, and warn; what torch's checkpoint calls it leaves alone by itself
uncompiled(Checkpointed.__call__, inside=True)
for _ours in (
    _check_arguments,
    _Region.__init__,
    Arguments.give,
    _found_in,
    _inside,
    _generators_in,
    contexts_of,
    offloaded_in,
    Offloaded.moving,
):
    uncompiled(_ours, inside=False)
