"""Code outside of a sharded module takes the part it reads, or is given, for the whole: found at the first run.

``watch`` is called when a schedule is built. The first forward of that model, or of whatever contains a part of it (an engine,
a stage, a wrapper), then runs with every torch function looked at; so does the first with gradients, if that is a later one.
After it nothing is left in the way of a call. A recompute in a backward runs code that was looked at in the forward.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from contextvars import ContextVar
from traceback import walk_stack
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.errors import BuildError
from slapo_core.parameters import facts, is_part
from slapo_core.tracing.calls import SHAPES, is_metadata, name_of

from . import failures, own_gradients, sharded_values
from ._torch_autograd import no_functions
from .followed import tensors_in
from .own_gradients import OwnGradients
from .rules import split_of
from .sharded_values import ShardedValues, is_ours

_OFF = "check=False turns this check off"
_HARMLESS = frozenset(("untyped_storage", "data_ptr"))
_LOOKING = (sharded_values.__file__, own_gradients.__file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep


class _Build:
    """The sharded modules of one build, and in which modes, with gradients or without, it has yet to run."""

    def __init__(self, owners: Iterable[nn.Module]) -> None:
        self.owners = WeakSet(owners)
        self.unseen = {True, False}

    def awaits(self, module: nn.Module) -> bool:
        return torch.is_grad_enabled() in self.unseen and any(inside in self.owners for inside in module.modules())

    def seen(self) -> None:
        self.unseen -= {False, torch.is_grad_enabled()}


_waiting: list[_Build] = []
_reads: ContextVar[_Reads | None] = ContextVar("reads", default=None)
_plain_call: Callable[..., Any] = nn.Module.__call__


def watch(owners: Iterable[nn.Module]) -> None:
    """Look at the first run of the model that has these sharded modules.

    The run raises ``BuildError`` where code outside of them uses one of their sharded tensors for more than its type, device
    and the like, or needs all of a value of which each rank has a part (see ``sharded_values``). As all ranks run the same
    code, all of them raise it.
    """
    build = _Build(owners)
    if not build.owners:
        return
    global _plain_call
    if nn.Module.__call__ is not _call:
        _plain_call = nn.Module.__call__
        nn.Module.__call__ = _call  # type: ignore[method-assign]
    _waiting.append(build)


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or nn.Module.__call__ is not _call:  # what is being traced is not run yet
        return _plain_call(module, *args, **kwargs)
    reads = _reads.get()
    if reads is not None:
        return reads.inside(module, args, kwargs)
    builds = [build for build in _waiting if build.awaits(module)]
    if not builds:
        if not all(build.owners for build in _waiting):
            _leave()
        return _plain_call(module, *args, **kwargs)
    with _eager(), _Reads() as reads:
        token = _reads.set(reads)
        try:
            result = reads.inside(module, args, kwargs)
        except RuntimeError as err:
            if (explained := reads.explained(err)) is None:
                raise
            raise explained from err
        finally:
            _reads.reset(token)
    for build in builds:
        build.seen()
    _leave()
    return result


def _leave() -> None:
    _waiting[:] = [build for build in _waiting if build.unseen and build.owners]
    if not _waiting and nn.Module.__call__ is _call:
        nn.Module.__call__ = _plain_call  # type: ignore[method-assign]


def _eager() -> Any:
    """What is compiled runs uncompiled this once; importing the compiler, where nobody has, would cost a second."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Reads(TorchFunctionMode):
    """Knows which modules run; refuses to use a sharded tensor that the innermost does not hold, and to mix sharded values."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.values = ShardedValues(self._mixed)
        self.gradients = OwnGradients(lambda why: BuildError(f"{self._named(self.running[-1])} at {_source()}: {why}; {_OFF}"))
        self.failed: tuple[Exception, str] | None = None

    def inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module."""
        self.running.append(module)
        handles = self.gradients.enter(module)
        try:
            with no_functions():
                self.values.enter(module, args, kwargs)
            result = _plain_call(module, *args, **kwargs)
            with no_functions():
                self.values.leave(module, result, last=len(self.running) == 1)
                self.gradients.leave(module, result)
        except RuntimeError as err:
            self._note(module, args, kwargs, err)
            raise
        finally:
            self.running.pop()
            for handle in handles:
                handle.remove()
        return result

    def explained(self, err: RuntimeError) -> BuildError | None:
        """What to raise instead: an error that names the innermost module, where sizes did not fit."""
        return BuildError(self.failed[1]) if self.failed is not None and self.failed[0] is err else None

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], err: Exception) -> None:
        """Code around may catch the error, so it passes as it is until it leaves the model."""
        if self.failed is None or self.failed[0] is not err:
            reason = failures.reason(module, args, kwargs, err)
            self.failed = None if reason is None else (err, f"{self._named(module)}: {reason}; {_OFF}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        for tensor in tensors:
            if is_part(tensor) and not self._is_own(tensor) and not _is_harmless(func):
                raise BuildError(self._message(func, tensor))
        if split_of(self.running[-1]) is not None:
            return self.values.call(func, args, kwargs, tensors, self.running)
        gradient = self.gradients.call(func, tensors, is_ours)
        result = self.values.call(func, args, kwargs, tensors, self.running)
        self.gradients.note(args[0] if result is None and args else result, gradient, tensors)
        return result

    def _is_own(self, tensor: torch.Tensor) -> bool:
        reader = self.running[-1]
        return any(held is tensor for held in [*reader._parameters.values(), *reader._buffers.values()])

    def _path(self, module: nn.Module) -> str:
        path = next((path for path, other in self.running[0].named_modules() if other is module), "")
        return re.sub(r"^(module(\.|$))+", "", path)  # engines and wrappers of torch call the model so

    def _named(self, module: nn.Module) -> str:
        path = self._path(module)
        return f"{type(module).__name__} {path!r}" if path else f"the model, {type(module).__name__},"

    def _mixed(self, owner: nn.Module, why: str, remedy: str) -> BuildError:
        reader = self.running[-1]
        reason = f"{why}, and each rank has a part of the output of {self._path(owner)!r}"
        return BuildError(f"{self._named(reader)} at {_source()}: {reason}; {remedy}; {_OFF}")

    def _message(self, func: Any, tensor: torch.Tensor) -> str:
        reader = self.running[-1]
        name = " = ".join(facts(tensor).names) or f"a parameter of shape {tuple(tensor.shape)}"
        return (
            f"{self._named(reader)} uses {name!r} in {name_of(func)} at {_source()}, but this rank "
            "has only its part of it, which its own module alone can use; call that module instead, or leave the parameter "
            f"whole; {_OFF}"
        )


def _is_harmless(func: Any) -> bool:
    """Whether the answer is the same for a part as for the whole, or tells nothing of values."""
    name = name_of(func)
    return name in _HARMLESS or (is_metadata(func, name) and name not in SHAPES)


def _source() -> str:
    frames = (f"{frame.f_code.co_filename}:{line}" for frame, line in walk_stack(sys._getframe(1)))
    return next((line for line in frames if not line.startswith((_TORCH, __file__, *_LOOKING, "<"))), "an unknown line")
