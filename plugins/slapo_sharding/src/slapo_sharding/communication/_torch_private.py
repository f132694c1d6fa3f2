"""Private names of torch that this distribution uses. A test of each fails when torch moves it."""

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

from slapo_tracing.nodes import current_modes, in_function_transform, leave_modes, without_fake_tensor_logs

REDISTRIBUTION_WORDS = ("redistribution", "placement changes")
"""Words in the errors of DTensor operations that would have to redistribute data."""

NO_BACKWARD = -1
backward_pass = torch._C._current_graph_task_id
"""Return the number of the backward pass that runs in this thread, or ``NO_BACKWARD``."""

StridedShard = _StridedShard
"""Placement of a fused dimension: a rank has a shard of each block."""

no_modes = _disable_current_modes
"""Context in which no ``TorchDispatchMode`` sees operators; a mode may be on one rank alone, such as a FLOP counter."""

_ALONG = "argmax argmin cumsum cumsum_ cumprod cumprod_ logcumsumexp"


class _RefuseSilentRedistribution(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that refuses operators for which DTensor redistributes without an error, or whose negative dim it misreads."""

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
    """Let DTensor operations in the block raise ``RuntimeError`` instead of moving data; plain tensors count as replicated.

    Attention runs as its math decomposition, for which DTensor has rules on every device. Autocast and gradient mode are
    restored, because a graph that fails inside such a region does not leave it.
    """
    before = current_modes()
    with (
        warnings.catch_warnings(),
        ExplicitRedistributionContext(strict=True),
        implicit_replication(),
        sdpa_kernel(SDPBackend.MATH),
        _RefuseSilentRedistribution(),  # type: ignore[no-untyped-call]
        without_fake_tensor_logs(),
    ):
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)  # no random number is used
        warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1", UserWarning)  # such a tensor is replicated
        try:
            yield
        finally:
            if current_modes() != before:
                leave_modes(before)


def fake_mesh(size: int) -> DeviceMesh:
    """Return a mesh of any number of ranks, existing or not, on which nothing can be sent.

    The dimension name keeps it unequal to real meshes: DTensor caches by mesh, and would use this one for real communication.
    """
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("rules of slapo",), _init_backend=False, _rank=0)


def global_state(device: torch.device) -> tuple[Any, ...] | None:
    """Return the global state that a torch function's result depends on; None if that is unknown.

    It is unknown under a ``TorchDispatchMode`` and inside transforms such as ``vmap``.
    """
    if torch._C._len_torch_dispatch_stack() or in_function_transform():
        return None
    kind = device.type
    casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return (torch.get_default_dtype(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(), casts)


def with_values(nested: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor with the sizes of ``nested`` and the values of the flat tensor ``values``."""
    sizes, strides = nested._nested_tensor_size(), nested._nested_tensor_strides()
    made: torch.Tensor = torch._nested_view_from_buffer(values, sizes, strides, nested._nested_tensor_storage_offsets())
    return made


def nested_without_padding(padded: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Return the nested tensor without padding, in the layout that torch's encoders use."""
    made: torch.Tensor = torch._nested_tensor_from_mask(padded, ~padding, mask_check=False)
    return made
