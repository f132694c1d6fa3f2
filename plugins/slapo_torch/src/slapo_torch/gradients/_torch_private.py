"""Private names of torch that this package uses; a test fails when torch moves one."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.distributed.distributed_c10d import _get_default_store

no_functions = torch._C.DisableTorchFunction
"""Context in which torch functions skip all overrides: subclasses and modes of other code."""


def default_store() -> Store:
    """Return the store of the default process group; it works while a collective is stuck."""
    return _get_default_store()


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage while it lives; of fake tensors, too, which have no data pointer."""
    return int(tensor.untyped_storage()._cdata)
