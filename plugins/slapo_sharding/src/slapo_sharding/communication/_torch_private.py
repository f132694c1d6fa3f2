"""The private names of torch that this distribution uses. A test checks each: it fails when torch moves one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slapo_tracing.nodes import current_modes, in_function_transform, leave_modes, quiet

REDISTRIBUTION_WORDS = ("redistribution", "placement changes")
"""Words in the error of an operation that cannot be done without sending data."""

NO_BACKWARD = -1
backward_pass = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread, or ``NO_BACKWARD``."""

StridedShard = _StridedShard
"""The placement of a dimension that is made of blocks, of each of which a rank has a part."""

no_modes = _disable_current_modes
"""A context in which no ``TorchDispatchMode`` sees operators: one rank alone may have one, a counter say."""

_ALONG = "argmax argmin cumsum cumsum_ cumprod cumprod_ logcumsumexp"


class _RefuseSilentRedistribution(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what DTensor sends data for unasked, or takes for local where the dimension is given as a negative number."""

    supports_higher_order_operators = True
    operators = frozenset(getattr(torch.ops.aten, name) for name in _ALONG.split())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)
        if packet is torch.ops.aten.convolution and isinstance(args[0], DTensor):
            if any(placement.is_shard(dim) for placement in args[0].placements for dim in range(2, args[0].dim())):
                raise RuntimeError(f"{func} along a sharded dimension takes a redistribution of what kernels overlap")
        elif packet in self.operators and isinstance(args[0], DTensor):
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
            dims = range(args[0].dim()) if dim is None else (dim % args[0].dim(),)
            if any(placement.is_shard(along) for placement in args[0].placements for along in dims):
                raise RuntimeError(f"{func} along a sharded dimension takes a redistribution")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_redistribution() -> Iterator[None]:
    """DTensor operations inside never move data: one that would is a ``RuntimeError``. Plain tensors count as replicated.

    Attention is computed from its parts, for which DTensor has rules on every device. Autocast and gradient mode are restored:
    a graph that fails inside of a region does not leave it.
    """
    before = current_modes()
    with (
        warnings.catch_warnings(),
        ExplicitRedistributionContext(strict=True),
        implicit_replication(),
        sdpa_kernel(SDPBackend.MATH),
        _RefuseSilentRedistribution(),  # type: ignore[no-untyped-call]
        quiet(),
    ):
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)  # nothing is drawn
        warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1", UserWarning)  # it is whole
        try:
            yield
        finally:
            if current_modes() != before:
                leave_modes(before)


def fake_mesh(size: int) -> DeviceMesh:
    """A mesh of any number of ranks, whether there are so many or not: nothing can be sent on it.

    It is no other's equal, as DTensor remembers what it found for equal ones, and would give this one to those who send.
    """
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("rules of slapo",), _init_backend=False, _rank=0)


def global_state(device: torch.device) -> tuple[Any, ...] | None:
    """Return the global state that a torch function's result may depend on; None where it may depend on anything.

    It may under a ``TorchDispatchMode``, and inside of transforms like ``vmap``.
    """
    if torch._C._len_torch_dispatch_stack() or in_function_transform():
        return None
    kind = device.type
    casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return (torch.get_default_dtype(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(), casts)


def with_values(nested: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor of the same sizes as another one, of all its numbers one after the other."""
    sizes, strides = nested._nested_tensor_size(), nested._nested_tensor_strides()
    made: torch.Tensor = torch._nested_view_from_buffer(numbers, sizes, strides, nested._nested_tensor_storage_offsets())
    return made


def nested_without_padding(padded: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor, of the layout that torch's encoders use, without what is padding."""
    made: torch.Tensor = torch._nested_tensor_from_mask(padded, ~padding, mask_check=False)
    return made
