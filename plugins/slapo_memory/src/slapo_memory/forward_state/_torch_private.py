"""Private torch API of this package."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

no_modes = _disable_current_modes
"""Context manager that hides operators from dispatch modes: a policy counts the model's calls and must not count ours."""
no_functions = torch._C.DisableTorchFunction
"""Context manager that hides torch functions from function modes: one that records the model's reads must not see ours."""


def runs_eagerly() -> bool:
    """Return whether ``torch.compiler.set_stance("force_eager")`` is in force; torch has no public name for it."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and frames._stance.stance == "force_eager"


def exclude_from_compilation(function: Any, inside: bool) -> None:
    """Exclude a function, and its callees unless ``inside``, from compilation.

    ``torch.compiler.disable`` does this too, but its import takes a second.
    """
    function = inspect.unwrap(function)
    function._torchdynamo_disable = True  # where a caller is compiled
    around = _FrameAction.DEFAULT if inside else _FrameAction.SKIP
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, around))  # where it is called


def has_function_mode() -> bool:
    """Return whether a torch function mode is active, other than that of ``torch.set_default_device``."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def is_about_fake_tensors(error: Exception) -> bool:
    """Return whether an error is about a fake tensor's limits, rather than about a wrong call."""
    own = type(error).__module__.startswith(("torch._subclasses", "torch.fx.experimental"))
    return own or any(word in str(error) for word in ("FakeTensor", "fake tensor", "tensor subclass"))


def alias_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias that shares the version counter, also inside a dispatch mode."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that all views of one storage share while one of them lives."""
    if tensor.layout is not torch.strided:  # a sparse tensor has no storage of its own
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """Return a weak reference that reserves the storage's ``storage_key`` without keeping its memory alive."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def completed_work(collective: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of a ``torch.ops.c10d`` operator without communication: its output tensors and a completed work."""
    from torch._C._distributed_c10d import FakeWork  # noqa: PLC0415  not in every build of torch

    work = FakeWork().boxed()
    returned = [str(value.type) for value in collective._schema.returns]
    return work if len(returned) == 1 else (args[0], work)


def has_fake_mode() -> bool:
    """Return whether a ``FakeTensorMode`` is active, whose tensors have no numbers."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
