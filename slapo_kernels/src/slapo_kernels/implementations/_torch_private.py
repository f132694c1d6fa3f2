"""The one place of this package that knows what torch does not document: who looks on while a forward runs."""

from __future__ import annotations

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from slapo_tracing.nodes import in_function_transform


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


def will_run(node: Node) -> bool:
    """Whether the backward that is running goes on to a node of the graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of leaves that are asked for by torch.autograd.grad, and of no others
        return True


def is_transformed() -> bool:
    """Whether torch.func or forward-mode automatic differentiation is at work."""
    return in_function_transform() or forward_ad._current_level >= 0


def is_fsdp_hook(hook: object) -> bool:
    """Whether it is what ``fully_shard`` puts on the outputs of a module, to gather weights before the backward."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")
