"""Private torch API of this package: whether a trace, compiler, transform or backward observes the running forward."""

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
    """Return whether the tensor is fake or a proxy, or a torch mode records operations, as during a trace."""
    if isinstance(tensor, FakeTensor | torch.fx.Proxy):
        return True
    if not _len_torch_function_stack() and not _len_torch_dispatch_stack():
        return False
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not isinstance(mode, DeviceContext) for mode in functions):
        return True
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def is_traced_or_compiled(forced: bool = False) -> bool:
    """Return whether the original forward should run: in a trace, and when compiled, which a ``forced`` kernel allows."""
    return not forced if torch.compiler.is_compiling() else is_dry_run()


def backward_will_run(node: Node) -> bool:
    """Return whether the running backward will execute a node of the graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised only for leaves that torch.autograd.grad was asked for
        return True


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode automatic differentiation is active."""
    return in_function_transform() or forward_ad._current_level >= 0


def is_fsdp_hook(hook: object) -> bool:
    """Return whether a hook is the one by which ``fully_shard`` gathers weights before a module's backward."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")
