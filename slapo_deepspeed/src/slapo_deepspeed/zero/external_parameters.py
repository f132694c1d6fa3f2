"""Detection of parameters that code reads outside of the modules that hold them, under stage 3 of ZeRO."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from slapo_core import BuildError
from slapo_tracing.nodes import SHAPES, is_metadata, name_of

from ..process_state._deepspeed_private import is_partitioned, watch_external_parameters

_HARMLESS = frozenset(
    ("requires_grad_", "grad", "register_hook", "retain_grad", "numel")
)  # code that counts elements expects empty parameters
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
