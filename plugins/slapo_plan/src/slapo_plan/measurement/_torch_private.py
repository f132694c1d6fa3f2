"""Private names of torch that this package uses; a test fails when torch moves one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import ScriptObject
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

_FUNCTIONAL = "_c10d_functional"
COLLECTIVES: dict[str, dict[str, str]] = {
    _FUNCTIONAL: {
        "all_reduce": "all_reduce",
        "all_reduce_": "all_reduce",
        "all_reduce_coalesced": "all_reduce",
        "all_reduce_coalesced_": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "all_gather_into_tensor_coalesced": "all_gather",
        "all_gather_into_tensor_out": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_tensor_coalesced": "reduce_scatter",
        "all_to_all_single": "all_to_all",
        "broadcast": "broadcast",
        "broadcast_": "broadcast",
    },
    "c10d": {
        "allreduce_": "all_reduce",
        "allreduce_coalesced_": "all_reduce",
        "allgather_": "all_gather",
        "_allgather_base_": "all_gather",
        "allgather_into_tensor_coalesced_": "all_gather",
        "reduce_scatter_": "reduce_scatter",
        "_reduce_scatter_base_": "reduce_scatter",
        "reduce_scatter_tensor_coalesced_": "reduce_scatter",
        "alltoall_base_": "all_to_all",
        "alltoall_": "all_to_all",
        "broadcast_": "broadcast",
        "reduce_": "reduce",
        "gather_": "gather",
        "scatter_": "scatter",
        "send": "send",
        "recv_": "receive",
    },
}
"""Namespace and name of torch's operators of collectives, and the kind of each."""

WAIT = torch.ops._c10d_functional.wait_tensor.default
"""Operator that waits for a collective."""


def group_ranks(arguments: dict[str, Any]) -> tuple[int, ...]:
    """Return the global ranks of the group that an operator of a collective is given, by the names of its schema."""
    if "process_group" in arguments:
        group = arguments["process_group"]
        if isinstance(group, ScriptObject):
            group = dist.ProcessGroup.unbox(group)
    else:
        group = dist.distributed_c10d._resolve_process_group(arguments["group_name"])
    return tuple(dist.get_process_group_ranks(group))


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call by name; defaults are left out."""
    names = [each.name for each in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage while it lives."""
    return storage._cdata
