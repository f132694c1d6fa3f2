"""Hooks that run a sync around its module, on positional and keyword inputs, and the check of their order.

Each sync must get its value in the layout that it needs from the syncs before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree

from slapo_core import BuildError, Schedule, ScheduleError
from slapo_tracing.nodes import Hidden

from ..communication import collectives
from ..communication._torch_private import with_values
from ..rules.embeddings import with_global_ids
from ..rules.sharding_rule import AppliedCut, applied_cut
from . import overlapped_reduction
from .overlapped_reduction import SharedGradientReduction

REDUCING = ("all_reduce", "reduce_scatter")
"""Operations that reduce a partial output."""


@dataclass(frozen=True)
class Sync(Hidden):
    """Sync of a module, registered as a torch hook with keyword inputs.

    Args:
        mode: ``"fwd_pre"``, ``"fwd_post"`` or ``"bwd_post"``; for ``"grad"`` see ``splitting.persistent_hooks``.
        op: Name of the operation, or ``"function"``.
        axis: Dimension that the operation works along.
        group: Ranks that take part.
        backward: Backward of ``all_gather``.
        fn: The user's function.
        takes_kwargs: True if ``fn`` takes the keyword inputs as well.
        new_axis: Dimension that ``all_to_all`` splits.
        path: Path of the module, for errors.
        shared: Reduction of the inputs' gradients that this module shares with others.
    """

    mode: str
    op: str
    axis: int | None = None
    group: collectives.Group = None
    backward: str = "split"
    fn: Callable[..., Any] | None = None
    takes_kwargs: bool = False
    shared: SharedGradientReduction | None = None
    new_axis: int | None = None
    path: str = ""

    @property
    def traced_with_layer(self) -> bool:
        """True if a trace may record the sync with its module, see ``slapo_tracing.nodes.opaque_modules.is_opaque``."""
        return self.fn is None and self.mode in ("fwd_pre", "bwd_post")

    def __deepcopy__(self, memo: dict[int, Any]) -> Sync:
        return self  # groups cannot be copied; only ``shared`` has state, and that is of a running forward

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> Any:
        if self.mode == "fwd_post":
            return self._after(module, args, kwargs, output)
        if self.mode == "bwd_post" and self.fn is not None:
            return self.fn(module, args, kwargs)  # torch calls a backward hook with (module, grad_input, grad_output)
        if self.mode == "bwd_post":
            if len(args) == 1 and isinstance(args[0], torch.Tensor) and not kwargs:
                return (run_sync(args[0], self),), kwargs
            return pytree.tree_map_only(torch.Tensor, partial(run_sync, sync=self), (args, kwargs))
        return self._before(module, args, kwargs)

    def run(self, x: torch.Tensor, uneven: int | None = None) -> torch.Tensor:
        """Run the operation on one tensor; ``uneven`` is the full size if ranks have shards of different sizes."""
        if self.mode == "bwd_post":
            if not x.requires_grad or not torch.is_grad_enabled():
                return x
            return collectives.all_reduce_grad(x, self.group) if self.shared is None else self.shared.with_shared_reduction(x)
        if self.op == "all_reduce":
            return collectives.all_reduce(x, self.group)
        assert self.axis is not None
        self._check(x, uneven is not None)
        if self.op == "all_to_all":
            assert self.new_axis is not None
            return collectives.all_to_all(x, self.axis, self.new_axis, self.group)
        if self.op == "all_gather" and self.backward == "reduce_scatter":
            return overlapped_reduction.gather_with_overlap(x, self.axis, self.group, uneven)
        if self.op == "all_gather":
            return collectives.all_gather(x, self.axis, self.group, backward=self.backward, size=uneven)
        if self.op == "scatter":
            return collectives.scatter(x, self.axis, self.group, uneven=uneven is not None)
        return getattr(collectives, self.op)(x, self.axis, self.group)  # type: ignore[no-any-return]

    def _check(self, x: torch.Tensor, uneven: bool) -> None:
        """Raise ``ScheduleError`` if a dimension is missing, or the one to split is not divisible."""
        ranks, axes = collectives.num_ranks(self.group), [axis for axis in (self.axis, self.new_axis) if axis is not None]
        message = None
        if not all(-x.dim() <= axis < x.dim() for axis in axes):
            message = f" along axis {self.axis} of a tensor with {x.dim()} dimensions; give another axis"
        elif self.op != "all_gather" and not uneven and x.shape[axes[-1]] % ranks:
            size, dim = x.shape[axes[-1]], axes[-1] % x.dim()
            what = f"the sequence of {size}" if (x.dim(), dim) == (3, 1) else f"the {size} along dimension {dim}"
            remedy = "pad it to a multiple, or, to generate, leave out sequence_parallel"
            message = f": {what} in {list(x.shape)} cannot be split over {ranks} ranks; {remedy}"
        if message is not None:
            raise ScheduleError(f"{self.mode} {self.op}{message}", path=self.path, primitive="sync")

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.fn is None:
            return map_first_input(partial(self._run_along_cut, module), args, kwargs)
        result = self.fn(module, args, kwargs) if self.takes_kwargs else self.fn(module, args)
        if result is None or (self.takes_kwargs and not (isinstance(result, tuple) and len(result) == 2)):
            return result  # torch says what is wrong with it
        found, named = result if self.takes_kwargs else (result, kwargs)
        return with_global_ids(module, args, found if isinstance(found, tuple) else (found,)), named

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.fn is None:
            output = map_output(partial(self._run_along_cut, module), output)
        else:
            result = self.fn(module, args, kwargs, output) if self.takes_kwargs else self.fn(module, args, output)
            output = output if result is None else result
        return map_output(partial(self._add_bias, module), output) if self._adds_bias(module) else output

    def _adds_bias(self, module: nn.Module) -> bool:
        """Return whether this sync adds the bias that the module's forward leaves out: the reducing sync does."""
        applied = applied_cut(module)
        if applied is None or not applied.late_bias:
            return False
        others = [hook for hook in module._forward_hooks.values() if isinstance(hook, Sync)]
        reducing = [hook for hook in others if hook.op in REDUCING]
        return self is (reducing or [hook for hook in others if hook.fn is not None] or [self])[0]

    def _add_bias(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Add the bias in the output's own dtype, which autocast may have chosen.

        An output that was scattered along the bias's dimension needs a shard of the bias. An output that was scattered along
        another dimension has a partial gradient of the bias, which is reduced.
        """
        bias: torch.Tensor = module.bias
        applied = applied_cut(module)
        assert applied is not None
        dim = applied.cut.dim % x.dim()
        if self.op == "reduce_scatter":
            assert self.axis is not None
            same = self.axis % x.dim() == dim
            bias = collectives.scatter(bias, 0, self.group) if same else collectives.all_reduce_grad(bias, self.group)
        bias = bias.to(x.dtype)
        if x.is_nested:
            return with_values(x, (x.values().view(-1, len(bias)) + bias).flatten())
        return x + (bias.view(-1, *(1,) * (x.dim() - 1 - dim)) if dim < x.dim() - 1 else bias)

    def _run_along_cut(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run on an input or output; refuse to gather or scatter it along another dimension than the sharded one."""
        applied = applied_cut(module) if self.op in ("all_gather", "scatter") else None
        if applied is not None and applied.spec.num_shards > 1:
            side = {"fwd_post all_gather": applied.cut.output, "fwd_pre scatter": applied.cut.input}
            assert self.axis is not None
            if side.get(f"{self.mode} {self.op}") != "sharded":
                return run_sync(x, self)
            if (self.axis - applied.cut.dim) % x.dim():
                what = f"a {type(module).__name__} is sharded along {applied.cut.dim} there, not along {self.axis}"
                message = f"{self.mode} {self.op}: {what}; give axis={applied.cut.dim}"
                raise ScheduleError(message, path=self.path, primitive="sync")
            if applied.spec.uneven_ranges is not None:
                return run_sync(x, self, applied.spec.full_shape[applied.spec.dim])
        return run_sync(x, self)


def run_sync(x: torch.Tensor, sync: Sync, uneven: int | None = None) -> torch.Tensor:
    """Run a sync on a tensor, as one operation in a trace; see ``Sync.run``."""
    if has_torch_function_unary(x):
        return handle_torch_function(run_sync, (x,), x, sync, uneven)
    return sync.run(x, uneven)


def map_first_input(
    fn: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``fn`` to the first floating-point input, positional ones before keyword ones; return all inputs."""
    for index, value in enumerate(args):
        if _is_floating(value):
            return (*args[:index], fn(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if _is_floating(value):
            return args, {**kwargs, name: fn(value)}
    raise ScheduleError("sync found no floating-point tensor among the inputs; give a function that finds it")


def map_output(fn: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Apply ``fn`` to the output, or to the first tensor in a tuple, list, mapping or dataclass."""
    if isinstance(output, torch.Tensor):
        return fn(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [entry.name for entry in dataclasses.fields(output)]
        for name in names:
            if isinstance(value := getattr(output, name), torch.Tensor):
                return dataclasses.replace(output, **{name: fn(value)})
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, torch.Tensor):
                return type(output)({**output, name: fn(value)})  # type: ignore[call-arg]
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            if isinstance(value, torch.Tensor):
                items = [*output[:index], fn(value), *output[index + 1 :]]
                return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    raise ScheduleError(f"sync found no tensor in an output of type {type(output).__name__}; give a function that finds it")


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the first floating-point input, which syncs and cuts apply to, or None."""
    return next(filter(_is_floating, (*args, *kwargs.values())), None)


def syncs_of(module: nn.Module, mode: str | None = None) -> Iterator[Sync]:
    """Yield the module's own syncs, of one mode or of all, in the order in which they run on each side."""
    tables: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    for hook in chain.from_iterable(table.values() for table in tables):
        if isinstance(hook, Sync) and mode in (None, hook.mode):
            yield hook


def join_shared_reduction(schedule: Schedule, members: Sequence[str], more: Sequence[str]) -> None:
    """Let more modules take part in the reduction of input gradients that others share; paths are below the schedule."""
    modules = [schedule.mod.get_submodule(path) for path in members]
    found = [sync for sync in syncs_of(modules[0], "bwd_post") if all(sync in syncs_of(each) for each in modules)]
    sync, shared = found[-1], found[-1].shared
    assert shared is not None
    for path in more:
        module = schedule.mod.get_submodule(path)
        schedule.touch(module)
        module.register_forward_pre_hook(sync, with_kwargs=True)
    shared.members += len(more)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


GATHERING_OPS = ("all_gather", "all_to_all")
"""Operations that join shards."""


def off_switch(check: str) -> str:
    """Return the clause that ends the errors of the check of this name."""
    return f"check=False turns this check off with all others, SLAPO_DISABLE_CHECKS={check} alone"


OFF_SWITCH = off_switch("syncs")

_State = Literal["whole", "sharded", "partial"]
_STATES: dict[str, tuple[_State, _State]] = {
    "all_gather": ("sharded", "whole"),
    "all_to_all": ("sharded", "sharded"),
    "scatter": ("whole", "sharded"),
    "all_reduce": ("partial", "whole"),
    "reduce_scatter": ("partial", "sharded"),
}
"""Operation to the layout that it needs, and the one that it makes."""


def check_sync_order(name: str, module: nn.Module, applied: AppliedCut | None) -> None:
    """Check the layouts of a module's input and output through its syncs.

    Raises:
        BuildError: a sync or the module gets another layout than it needs.
    """
    _state_after_syncs(name, module, "fwd_post", applied.cut.output if applied is not None else None)
    given = _state_after_syncs(name, module, "fwd_pre", None)
    if applied is None or given is None or applied.cut.input == "indices":
        return
    taken: _State = "sharded" if applied.cut.input == "sharded" else "whole"
    if given != taken:
        raise BuildError(
            f"{name}: its input is {given} after its syncs, and it takes one that is {taken}; leave them out; {OFF_SWITCH}"
        )


def _state_after_syncs(name: str, module: nn.Module, mode: str, state: _State | None) -> _State | None:
    """Return the layout after the syncs of a mode; None if unknown."""
    side, last = "output" if mode == "fwd_post" else "input", ""
    for sync in syncs_of(module, mode):
        needed, made = _STATES.get(sync.op, (None, None))
        if None not in (state, needed) and state != needed:
            remedy = "sync it once" if sync.op == last else "leave one of them out" if last else "leave it out, or make it so"
            after = f" after {last}" if last else ""
            wrong = f"its {side} is {state}{after}, and sync({mode!r}, {sync.op!r}) needs it {needed}"
            raise BuildError(f"{name}: {wrong}; {remedy}; {OFF_SWITCH}")
        state, last = made, sync.op
    return state
