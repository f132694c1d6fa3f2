"""Private names of torch that this package uses; a test fails when torch moves one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

WAIT = torch.ops._c10d_functional.wait_tensor.default
"""Operator that waits for a collective."""

READ = torch.ops.aten._local_scalar_dense.default
"""Operator of ``tensor.item()``."""


def saved_tensors_are_hooked() -> bool:
    """Return whether a context of ``torch.autograd.graph.saved_tensors_hooks`` is entered."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage while it lives."""
    return int(storage._cdata)


def ranks_of_group(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group in order.

    Args:
        group: Process group as an operator receives it: the name of a group, or an object of TorchScript.
    """
    from torch.distributed import distributed_c10d  # noqa: PLC0415  not in every build of torch

    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found = resolve(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(found))
