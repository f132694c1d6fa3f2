"""The private names of torch that this distribution uses. A test checks each: it fails when torch moves one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def layouts_kept() -> Iterator[None]:
    """DTensor operations inside never move data: one that would is a ``RuntimeError``. Plain tensors count as replicated.

    Attention is computed from its parts, for which DTensor has rules on every device.
    """
    with (
        warnings.catch_warnings(),
        ExplicitRedistributionContext(strict=True),
        implicit_replication(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)  # nothing is drawn
        yield
