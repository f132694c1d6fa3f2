"""Recomputation: a function runs without saving its activations, and again in the backward pass."""

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

from ..forward_state._torch_private import exclude_from_compilation, has_fake_mode, has_function_mode, no_modes, runs_eagerly
from ..forward_state.arguments import Arguments
from ..forward_state.module_state import ForwardState, version_of
from ..forward_state.random_state import RandomState
from ..forward_state.value_kinds import Kind, kind_of
from ..selective_checkpoint.kept_outputs import OperatorPolicy, contexts_of
from .cpu_offload import OffloadWrapper, find_offload, offload_disabled

_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Keyword arguments that are torch's, not the function's."""


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Checkpoint a model or part of the model.

    It differs from ``torch.utils.checkpoint.checkpoint`` as follows. The recomputation also restores the random states that
    Slapo tracks, Python's and NumPy's. Keyword arguments reach ``function`` in both modes. Without gradients ``function`` is
    just called. Buffers, attributes and random generators advance once in the modules that ``function`` is, is a method of,
    has among its arguments, or refers to as a closure or ``partial``. State elsewhere, in other objects or globals, advances
    again in the recomputation, without an error here.

    Args:
        function: The function to run, and to run again in the backward pass.
        *args: Its positional arguments.
        use_reentrant: Use torch's older implementation; it gives no gradients unless a tensor argument requires one.
        **kwargs: Its keyword arguments, and torch's options: ``preserve_rng_state``, and without ``use_reentrant``
            ``context_fn``, ``determinism_check``, ``debug``, ``early_stop``.

    Returns:
        The result of ``function``.

    Raises:
        ScheduleError: an argument is an iterator, the result is a generator, the function writes to an argument in place, or,
            with ``use_reentrant``, it returns tensors in anything but a tuple.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler's recomputation restores random states itself
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    _check_arguments("", *args, *kwargs.values())
    found = _stateful_objects((function, args, kwargs))
    region = _RecomputedRegion(function, args, kwargs, found, options.get("preserve_rng_state", True))
    region.check = partial(_check_result, "", use_reentrant)
    options["preserve_rng_state"] = region.leaves_random_states_to_torch
    return torch_checkpoint.checkpoint(region, *region.arguments.take_tensors(), use_reentrant=use_reentrant, **options)


class CheckpointWrapper:
    """Forward wrapper that ``sch.checkpoint()`` puts around a module; all keyword arguments go to the module.

    Args:
        policy: Policy of the outputs to keep; see ``contexts_of``.
        path: Path of the module, for messages.
    """

    def __init__(self, policy: Any = None, path: str = "") -> None:
        self._policy = OperatorPolicy.of(policy) or policy  # a form that can be pickled with the model
        self._path = path

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        _check_arguments(self._path, *args, *kwargs.values())
        found = _stateful_objects(call)
        region = _RecomputedRegion(call, args, kwargs, found + _generators_in(args, kwargs))
        region.check = partial(_check_result, self._path, False)
        contexts = contexts_of(self._policy)
        options: dict[str, Any] = {"preserve_rng_state": region.leaves_random_states_to_torch}
        if contexts is not None:
            options["context_fn"] = contexts
        if not (self in _verified_wrappers or has_fake_mode() or _partitioned_by_zero(found)):
            region.compare = self._compare
            options["early_stop"] = False  # the comparison needs the result
        offloaded = find_offload(call)
        # only the inputs are saved, so only they are offloaded
        with offloaded.offload_hooks(call) if offloaded is not None else nullcontext():
            return torch_checkpoint.checkpoint(region, *region.arguments.take_tensors(), use_reentrant=False, **options)

    def _compare(self, before: ResultSample, now: ResultSample) -> None:
        if before.differs(now):
            what = "the recomputation gives other numbers than the forward, and gradients would be wrong"
            advice = "keep random generators and counts in attributes of the module, or leave the module as it is"
            raise ScheduleError(f"{what}: it uses state that has advanced since; {advice}", **_error_location(self._path))
        _verified_wrappers.add(self)


# wrappers whose recomputation gave the forward's result once; outside the wrappers, which are part of the model
_verified_wrappers: WeakSet[CheckpointWrapper] = WeakSet()


def _partitioned_by_zero(found: list[Any]) -> bool:
    """Return whether DeepSpeed's ZeRO shards the parameters.

    ZeRO frees parameters at the end of a module's forward. A recomputation without early stop reaches that end, and would free
    what the module's backward is about to use.
    """
    modules = (each for each in found if isinstance(each, nn.Module))
    return any(hasattr(parameter, "ds_status") for module in modules for parameter in module.parameters())


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether ``sch.checkpoint()`` has wrapped a module's forward."""
    return any(isinstance(wrapper, CheckpointWrapper) for wrapper in forward_wrappers(module))


SAMPLE_SIZE = 512
"""Elements sampled from each tensor; fewer than twice as many."""


class ResultSample:
    """Evenly spaced elements of each tensor in a result, to compare a recomputation with its forward."""

    def __init__(self, result: Any) -> None:
        with torch.no_grad(), no_modes():
            self._parts = [_subsample(tensor) for tensor in Arguments((result,), {}).tensors if _has_numbers(tensor)]

    def differs(self, other: ResultSample) -> bool:
        """Return whether the other sample differs by more than nondeterministic sums can cause."""
        if [part.shape for part in self._parts] != [part.shape for part in other._parts]:
            return False  # torch itself checks the metadata of recomputed tensors
        with torch.no_grad(), no_modes():
            return not all(map(_is_close, self._parts, other._parts))


def _has_numbers(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_meta and not tensor.is_quantized and tensor.numel() > 0


def _subsample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE_SIZE)].clone()


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or torch.equal(one, other):
        return one.dtype == other.dtype
    if not one.is_floating_point():
        return False
    largest = one.nan_to_num(0, 0, 0).abs().max().double().item()
    allowed = max(1e-3, 16 * torch.finfo(one.dtype).eps) * largest
    return torch.allclose(one.double(), other.double(), rtol=0, atol=allowed, equal_nan=True)


class _RecomputedRegion:
    """A function with its arguments, called once for the forward and once for each recomputation.

    Attributes:
        leaves_random_states_to_torch: Whether torch must restore the states of devices that ``RandomState`` lacks.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, found: list[Any], preserve_rng_state: bool = True
    ) -> None:
        modules = [each for each in found if isinstance(each, nn.Module)]
        self.function = function
        self.arguments = Arguments(args, kwargs)
        self._original: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._random = RandomState() if preserve_rng_state else None
        self.leaves_random_states_to_torch = self._random is not None and not self._random.covers(self.arguments.tensors)
        self._state = ForwardState(modules, [each for each in found if not isinstance(each, nn.Module)])
        self._is_eager, self._has_function_mode = runs_eagerly(), has_function_mode()
        self.check: Callable[[Any, bool], None] = lambda result, wrote: None
        self.compare: Callable[[ResultSample, ResultSample], None] | None = None
        self._sample: ResultSample | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._original is not None:  # the forward gets the caller's arguments, so that the caller sees its changes
            (args, kwargs), self._original = self._original, None
            versions = [*map(version_of, tensors)]
            with offload_disabled():
                result = self.function(*args, **kwargs)
            self.check(result, versions != [*map(version_of, tensors)])
            self._state.keep_changed()
            self._sample = ResultSample(result) if self.compare is not None else None
            return result
        args, kwargs = self.arguments.rebuild(tensors)
        with (
            self._random.restore_for_block() if self._random else nullcontext(),
            self._state.restore_for_block(),
            self._same_compile_mode(),
            offload_disabled(),
        ):
            result = self.function(*args, **kwargs)
        if self.compare is not None and self._sample is not None:
            before, self._sample = self._sample, None
            self.compare(before, ResultSample(result))
        return result

    @contextmanager
    def _same_compile_mode(self) -> Iterator[None]:
        """Run the block compiled or eager as the forward ran: compiled code and kernels save other tensors than eager code."""
        stance = torch.compiler.set_stance("force_eager") if self._is_eager and not runs_eagerly() else nullcontext()
        with stance, _PassThroughMode() if self._has_function_mode and not has_function_mode() else nullcontext():
            yield


class _PassThroughMode(TorchFunctionMode):
    """Function mode without an effect; under it kernels run eagerly, as under the mode of the forward."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _check_arguments(path: str, *given: Any) -> None:
    """Refuse iterators, which the forward exhausts."""
    for value in given:
        if isinstance(value, Iterator):
            what = f"an argument is a {type(value).__name__}, of which nothing is left for the recompute"
            raise ScheduleError(f"{what}; pass a list", **_error_location(path))


def _check_result(path: str, use_reentrant: bool, result: Any, wrote: bool) -> None:
    """Refuse a result that a recomputation cannot reproduce; ``wrote`` says that an argument was changed in place."""
    if wrote and (use_reentrant or any(tensor.requires_grad for tensor in Arguments((result,), {}).tensors)):
        what = "the forward writes to an argument in place, which a recompute needs as it was"
        raise ScheduleError(f"{what}; let it write to a copy, as x.clone() or inplace=False", **_error_location(path))
    parts = result if isinstance(result, (tuple, list)) else [result]
    for part in parts:
        if isinstance(part, (Generator, Coroutine, AsyncGenerator)):
            what = f"the forward returns a {type(part).__name__}, which runs when the checkpoint is over; return its values"
            raise ScheduleError(what, **_error_location(path))
    if not use_reentrant:
        return
    inside = [part for part in result if not isinstance(part, torch.Tensor)] if isinstance(result, tuple) else [result]
    for part in inside if not isinstance(result, torch.Tensor) else ():
        if any(tensor.is_floating_point() for tensor in Arguments((part,), {}).tensors):
            what = f"the function returns tensors in a {type(part).__name__}, which get no gradients with use_reentrant=True"
            raise ScheduleError(f"{what}; pass use_reentrant=False", **_error_location(path))


def _error_location(path: str) -> dict[str, Any]:
    return {"path": path, "primitive": "checkpoint"}


def _generators_in(*given: Any) -> list[Any]:
    return [found for found in _stateful_objects(given) if not isinstance(found, nn.Module)]


def _stateful_objects(value: Any) -> list[Any]:
    """Return the modules and random generators that a call refers to: itself, its object, arguments and closures."""
    found: list[Any] = []
    # keeps the objects: some are made on access, and another object could get the number of one that is gone
    seen: dict[int, Any] = {}
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
            waiting += _referenced_objects(value)
    return found


def _referenced_objects(value: Any) -> list[Any]:
    """Return the objects that ``_stateful_objects`` visits next from a value."""
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


# inside a compiled module the compiler would try these and warn; it skips what torch's checkpoint calls by itself
exclude_from_compilation(CheckpointWrapper.__call__, inside=True)
for _ours in (
    _check_arguments,
    _RecomputedRegion.__init__,
    Arguments.take_tensors,
    _stateful_objects,
    _referenced_objects,
    _generators_in,
    contexts_of,
    find_offload,
    OffloadWrapper.offload_hooks,
):
    exclude_from_compilation(_ours, inside=False)
