"""Hooks that run a sync around its module, on positional and keyword inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree

from slapo_core import ScheduleError
from slapo_tracing.nodes import Hidden

from ..communication import collectives
from ..communication._torch_private import with_values
from ..rules.layers import with_global_ids
from ..rules.sharding_rule import applied_cut
from . import overlapped_reduction
from .overlapped_reduction import SharedGradientReduction

REDUCING = ("all_reduce", "reduce_scatter")
"""Operations that reduce a partial output."""


@dataclass(frozen=True)
class Sync(Hidden):
    """Sync of a module, registered as a torch hook with keyword inputs.

    Args:
        mode: ``"fwd_pre"``, ``"fwd_post"`` or ``"bwd_post"``; for ``"grad"`` see ``GradientReductionHook``.
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


class GradientReductionHook:
    """Hook of a parameter that all-reduces each micro-batch's gradient over the group.

    Args:
        group: The ranks that each have a partial gradient.
        name: Name of the parameter, for the error if the gradient is replicated already.
        seen: True if the gradient is known to be partial, so that equal values on all ranks are no error.
    """

    of_schedule = True  # tells engines that it is no hook of the user's
    by_plan = False
    """True if a verified plan added the hook."""

    def __init__(self, group: collectives.Group, name: str, *, seen: bool = False) -> None:
        self.group, self.name, self.seen = group, name, seen

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReductionHook:
        return GradientReductionHook(self.group, self.name, seen=self.seen)

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # a backward may reach the parameter without a gradient for it
            return None
        total = collectives.all_reduce(grad, self.group)
        if not self.seen and not torch.compiler.is_compiling():
            self._check(grad, total)
        return total

    def _check(self, grad: torch.Tensor, total: torch.Tensor) -> None:
        """Raise ``ScheduleError`` for a gradient of several numbers that is the same on all ranks: it is not partial."""
        is_comparable = grad.numel() * grad.element_size() >= _MIN_BYTES_TO_COMPARE and bool(grad.any())
        self.seen = is_comparable
        ranks = collectives.num_ranks(self.group)
        if is_comparable and torch.allclose(total, grad * ranks, rtol=torch.finfo(grad.dtype).eps, atol=0):
            raise ScheduleError(
                f"the gradient of {self.name!r} is the same on every rank, so it is whole already and its sum would be "
                f"{ranks} times too large; leave sync('grad', 'all_reduce') out",
                primitive="sync",
            )


_MIN_BYTES_TO_COMPARE = 8


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the module's own parameters that need a gradient, by name."""
    return {name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad}


def mark_gradients_verified(module: nn.Module) -> None:
    """Record that the gradients of the module's own parameters are partial, even if they are equal on all ranks."""
    for parameter in trainable(module).values():
        for hook in (parameter._backward_hooks or {}).values():
            if isinstance(hook, GradientReductionHook):
                hook.seen = hook.by_plan = True


def reduces_gradient(parameter: torch.Tensor, by_plan: bool = False) -> bool:
    """Return whether a sync, or with ``by_plan`` one of a verified plan, reduces a parameter's gradient over the group."""
    hooks = (parameter._backward_hooks or {}).values()
    return any(isinstance(hook, GradientReductionHook) and (hook.by_plan or not by_plan) for hook in hooks)


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


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
