"""Code that the dialects of all engines share: micro-batches, labels, losses, options.

``BatchEngine`` and ``ExternalEngine`` are the bases of engines of other projects. They are imported when first used, so that
loading the plugin stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .distributed import gloo_threads as gloo_threads  # waits for them as the process ends

if TYPE_CHECKING:
    from .batch_engine import BatchEngine, MicroBatches
    from .external_engine import ExternalEngine
    from .stage_forward import StageForward

__all__ = ["BatchEngine", "ExternalEngine", "MicroBatches", "StageForward"]
_MODULES = dict(zip(__all__, ("batch_engine", "external_engine", "batch_engine", "stage_forward"), strict=True))


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
