"""The private names of torch that this package uses; a test fails when torch moves one."""

from __future__ import annotations

from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store


def default_store() -> Store:
    """The store of the default process group: it works while a collective is stuck."""
    return _get_default_store()
