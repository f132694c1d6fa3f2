"""Loading of Hugging Face safetensors into any layout, and export from any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names

if TYPE_CHECKING:
    from .consolidate import consolidate_model
    from .export import export_weights
    from .load import Weights
    from .tensor_views.fused_parameters import made_of
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "consolidate": ["consolidate_model"],
            "export": ["export_weights"],
            "load": ["Weights"],
            "tensor_views.fused_parameters": ["made_of"],
        },
    )

__all__ = ["Weights", "consolidate_model", "export_weights", "made_of"]
