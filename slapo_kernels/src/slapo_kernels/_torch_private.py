"""The one place of this package that knows what torch does not document: who looks on while a forward runs."""

from __future__ import annotations

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def is_dry_run(tensor: object = None) -> bool:
    """Whether operations are recorded or tensors without numbers, as while a model is traced."""
    if isinstance(tensor, FakeTensor | torch.fx.Proxy):
        return True
    if not _len_torch_function_stack() and not _len_torch_dispatch_stack():
        return False
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not isinstance(mode, DeviceContext) for mode in functions):
        return True
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def is_watched(forced: bool = False) -> bool:
    """Whether the model is traced or compiled, so that the operations of its own forward should be seen.

    Args:
        forced: A compiler sees the kernels then.
    """
    return not forced if torch.compiler.is_compiling() else is_dry_run()
