"""The one place of the registry that knows what torch does not document."""

from __future__ import annotations

import torch
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C import _len_torch_function_stack as num_function_modes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["is_dry_run", "num_dispatch_modes", "num_function_modes"]


def is_dry_run(tensor: object) -> bool:
    """Whether operations are recorded or tensors without numbers, as while a model is traced."""
    if isinstance(tensor, FakeTensor | torch.fx.Proxy):
        return True
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not isinstance(mode, DeviceContext) for mode in functions):
        return True
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
