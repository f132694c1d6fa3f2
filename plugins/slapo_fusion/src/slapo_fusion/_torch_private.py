"""The one place that knows what torch does not document."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def is_dry_run() -> bool:
    """Whether tensors are without numbers, as while a model is traced: torch would give up compiling for good."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def mode_options(mode: str | None) -> dict[str, Any]:
    """What a ``mode`` of ``torch.compile`` is in options of inductor, which takes one or the other."""
    if not mode:
        return {}
    from torch import _inductor  # noqa: PLC0415 - takes seconds

    return dict(_inductor.list_mode_options(mode))
