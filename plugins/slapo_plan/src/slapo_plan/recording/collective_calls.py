"""Collectives and messages among the operators that a process calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..records import CollectiveRecord
from ._torch_private import ranks_of_group

_CALLS: dict[str, tuple[str, int, int]] = {
    "allreduce_": ("all_reduce", 0, 1),
    "allreduce_coalesced_": ("all_reduce", 0, 1),
    "_allgather_base_": ("all_gather", 0, 2),
    "allgather_": ("all_gather", 0, 2),
    "allgather_coalesced_": ("all_gather", 0, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2),
    "alltoall_": ("all_to_all", 1, 2),
    "alltoall_base_": ("all_to_all", 1, 2),
    "broadcast_": ("broadcast", 0, 1),
    "reduce_": ("reduce", 0, 1),
    "gather_": ("gather", 1, 2),
    "scatter_": ("scatter", 0, 2),
    "send": ("send", 0, 1),
    "recv_": ("send", 0, 1),
}
"""Operators of ``torch.ops.c10d``: kind, and positions of the tensors that are counted and of the group."""

_FUNCTIONAL: dict[str, tuple[str, int | None, int]] = {
    "all_reduce": ("all_reduce", 0, 2),
    "all_reduce_": ("all_reduce", 0, 2),
    "all_reduce_coalesced": ("all_reduce", 0, 2),
    "all_reduce_coalesced_": ("all_reduce", 0, 2),
    "all_gather_into_tensor": ("all_gather", None, 2),
    "all_gather_into_tensor_coalesced": ("all_gather", None, 2),
    "all_gather_into_tensor_out": ("all_gather", None, 2),
    "reduce_scatter_tensor": ("reduce_scatter", 0, 3),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0, 3),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0, 3),
    "all_to_all_single": ("all_to_all", 0, 3),
    "broadcast": ("broadcast", 0, 2),
    "broadcast_": ("broadcast", 0, 2),
}
"""Operators of ``torch.ops._c10d_functional``, alike; None counts what they return."""


def collective_record(func: Any, args: tuple[Any, ...], output: Any) -> CollectiveRecord | None:
    """Return the record of a collective or message, or None for a barrier and for waiting.

    Messages are recorded at both ends. A collective counts as overlapped if it was started with ``async_op=True``.
    """
    name = func.overloadpacket.__name__
    if func.namespace == "_c10d_functional":
        if (call := _FUNCTIONAL.get(name)) is None:
            return None
        kind, counted, group = call
        return CollectiveRecord(kind, _nbytes(output if counted is None else args[counted]), ranks_of_group(args[group]))
    if name not in _CALLS:
        return None
    kind, position, group = _CALLS[name]
    ranks = ranks_of_group(args[group])
    nbytes = _nbytes(args[position]) * (len(ranks) if kind in ("gather", "scatter") else 1)
    if kind == "send":
        own, peer = dist.get_rank(), ranks[args[group + 1]]
        ranks = (own, peer) if name == "send" else (peer, own)
    return CollectiveRecord(kind, nbytes, ranks, _is_asynchronous(func, args))


def _is_asynchronous(func: Any, args: tuple[Any, ...]) -> bool:
    find: Callable[[Any], bool] = lambda argument: argument.name == "async_op"  # noqa: E731
    place = next((index for index, argument in enumerate(func._schema.arguments) if find(argument)), None)
    if place is None:  # messages
        return False
    return bool(args[place]) if place < len(args) else bool(func._schema.arguments[place].default_value)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.element_size()
    return sum(map(_nbytes, value))
