"""Private torch API of this package."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def is_dry_run() -> bool:
    """Return whether tensors are fake, as during a trace: torch would stop compiling the function for good."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def mode_options(mode: str | None) -> dict[str, Any]:
    """Return the inductor options of a ``mode``: ``torch.compile`` takes a mode or options, not both."""
    if not mode:
        return {}
    from torch import _inductor  # noqa: PLC0415 - takes seconds

    return dict(_inductor.list_mode_options(mode))
