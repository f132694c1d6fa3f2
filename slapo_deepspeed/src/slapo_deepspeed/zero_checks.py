"""Run-time checks for ZeRO: parameters read outside of their module, and gradients in another order per replica."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from slapo_core import BuildError, Program
from slapo_tracing.nodes import SHAPES, is_metadata, name_of
from slapo_training.distributed import all_reduce

from .process_state._deepspeed_private import is_partitioned, watch_external_parameters

# code that counts elements expects empty parameters
_HARMLESS = frozenset(("requires_grad_", "grad", "register_hook", "retain_grad", "numel"))
_SHAPES = SHAPES | {"dim", "ndim", "ndimension"}


class ExternalReads:
    """Check that no code reads a parameter that is not gathered; it runs in the first training and the first evaluation step.

    DeepSpeed gathers a parameter for a module that reads it as an attribute of another one, and then records its plan of
    gathers anew. Code that gets a parameter in any other way would compute with an empty tensor.
    """

    def __init__(self, model: Any, module: nn.Module) -> None:
        self._awaited = {True, False}
        self._watch: _ReadMode | None = None
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        watch_external_parameters(model, module)
        self._hooks = [
            module.register_forward_pre_hook(self._start_check, prepend=True),
            module.register_forward_hook(self._end_check, always_call=True),
        ]

    @contextmanager
    def check_once(self, training: bool) -> Iterator[None]:
        """Run a step inside; after it, forwards in the same mode are no longer checked."""
        yield
        self._awaited.discard(training)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _start_check(self, module: nn.Module, args: Any) -> None:
        if module.training in self._awaited and not torch.compiler.is_compiling():
            self._watch = _ReadMode(self._names)
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def _end_check(self, module: nn.Module, args: Any, output: Any) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _ReadMode(TorchFunctionMode):
    """Mode that checks the arguments of torch functions."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if id(each) in self._names and is_partitioned(each) and _is_read_by_model(func):
                raise BuildError(
                    f"{self._names[id(each)]!r} is read in {name_of(func)} where no module that holds it runs, and stage 3 of "
                    "ZeRO has none of its numbers there; use stage 1 or 2, or target='torch' with data_parallel='fsdp'"
                )
        return func(*args, **(kwargs or {}))


def _is_read_by_model(func: Any) -> bool:
    """Return True if the model's code, not DeepSpeed's, reads values or a shape."""
    name = name_of(func)
    if (is_metadata(func, name) and name not in _SHAPES) or name in _HARMLESS or name.startswith("new_"):
        return False
    callers = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe(2)))
    return not next(each for each in callers if not each.startswith(("torch.", "slapo_"))).startswith("deepspeed.")


_NOTHING = -(2**40)


class UsedParameters:
    """Check that replicas and micro-batches use the same parameters in the same order; stage 0 of ZeRO checks nothing.

    Stages 1 and 2 of ZeRO put gradients into buckets in the order of the backward and reduce the buckets over the replicas,
    so all replicas need the same order. Stage 3 loses the gradients of parameters that only some micro-batches of a step
    use.
    """

    def __init__(self, program: Program, parameters: Mapping[str, nn.Parameter], zero_stage: int) -> None:
        self._program, self._zero_stage = program, zero_stage
        self._order, self._used = 0, set[int]()
        self._first: set[int] | None = None
        self._differs = False
        self._compares = zero_stage in (1, 2) and program.axis_size("dp") > 1
        self._handles: list[RemovableHandle] = []
        self._names = [*parameters]
        if zero_stage:
            for index, parameter in enumerate(parameters.values()):
                if parameter.requires_grad:
                    self._handles.append(parameter.register_hook(self._order_hook(index)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _order_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        word = index.to_bytes(4, "little")

        def note(gradient: torch.Tensor) -> None:
            self._order = zlib.crc32(word, self._order)
            self._used.add(index)

        return note

    def check_new(self) -> None:
        """Refuse gradients that were computed since the last step.

        Raises:
            BuildError: there are some; ZeRO has taken them and would step with them.
        """
        if self._used:
            name = self._names[min(self._used)]
            raise BuildError(
                f"{name!r} got a gradient outside of train_batch, as in another engine's backward, and ZeRO has taken it; "
                "freeze the parameters meanwhile (requires_grad_(False)), or use stage 0 or target='torch'"
            )

    def end_micro_batch(self) -> None:
        """Compare the parameters that this micro-batch used with the first one's; call it after each backward."""
        if self._zero_stage == 3:
            self._differs |= self._first is not None and self._used != self._first
            self._first, self._used = self._first if self._first is not None else self._used, set()

    def check(self) -> None:
        """Compare the replicas, and reset the record. Collective with ZeRO; call it after the last micro-batch's backward.

        Raises:
            BuildError: on every rank: replicas or micro-batches differ, and the gradients may be wrong.
        """
        order, differs = self._order, self._differs
        self._order, self._differs, self._first = 0, False, None
        self._used.clear()
        mesh = self._program.mesh
        if not self._compares and self._zero_stage != 3:
            return
        slots = [_NOTHING] * (2 * self._program.axis_size("pp") * self._program.axis_size("tp"))
        own = 2 * (self._program.axis_rank("pp") * self._program.axis_size("tp") + self._program.axis_rank("tp"))
        slots[own : own + 2] = order, -order
        row = torch.tensor([int(differs), *slots], device=mesh.device_type if mesh is not None else "cpu")
        some, *found = all_reduce(row, mesh, dist.ReduceOp.MAX).tolist()
        if some:
            raise BuildError(
                "micro-batches of one step use different parameters, whose gradients stage 3 of ZeRO would lose; use stage 0 "
                "to 2, or microbatches=1"
            )
        if self._compares and any(high != -low for high, low in zip(found[::2], found[1::2], strict=True)):
            raise BuildError(
                f"replicas use different parameters, or in another order, and stage {self._zero_stage} of ZeRO would add up "
                "gradients of one to those of another; use stage 0, or target='torch' or 'megatron'"
            )
