"""Who looks on while a forward runs; one of the places that know what torch does not document."""

from __future__ import annotations

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def is_watched(forced: bool = False) -> bool:
    """Whether the model is traced or compiled, so that the operations of its own forward should be seen.

    Args:
        forced: A compiler sees the kernels then.
    """
    if torch.compiler.is_compiling():
        return not forced
    if not _len_torch_function_stack() and not _len_torch_dispatch_stack():
        return False
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if modes and not all(isinstance(mode, DeviceContext) for mode in modes):
        return True
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
